"""Late examples: each comes once, never far from its place, and decisions repeat exactly."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from stoker.stages.late import LateOrder, Sizes
from strategies import few


@dataclass
class Epoch:
    """An epoch whose examples are ready at drawn times, and whose batches are due at others."""

    group: int
    late: int
    total: int
    ready_at: list[float]
    steps: list[float]

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.group, self.late, self.total)

    def order(self) -> LateOrder:
        return LateOrder(self.sizes)

    def run(self, order: LateOrder) -> list[list[int]]:
        """Decide all batches from where an order is; the clock goes on by events alone."""
        now, batches = 0.0, []
        while order.batch < order.batches:
            now += self.steps[order.batch]
            while True:
                choice = order.choose(lambda each: self.ready_at[each] <= now, is_due=True)  # noqa: B023
                if choice.taken is not None:
                    batches.append(choice.taken)
                    break
                assert choice.waits_for
                next_ready = min(self.ready_at[each] for each in choice.waits_for)
                assert next_ready > now  # it waits for nothing that is there
                now = next_ready
        return batches


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    group, late = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    total = draw(st.integers(1, 40))
    slow = st.one_of(st.floats(0, 1), st.floats(0, 1), st.floats(0, 30))
    ready_at = draw(st.lists(slow, min_size=total, max_size=total))
    batches = -(-total // group)
    steps = draw(st.lists(st.floats(0, 2), min_size=batches, max_size=batches))
    return Epoch(group, late, total, ready_at, steps)


@few(200)
@given(epochs())
def test_each_comes_once_and_near_its_place(epoch: Epoch) -> None:
    order = epoch.order()
    batches = epoch.run(order)
    assert sorted(each for batch in batches for each in batch) == list(range(epoch.total))
    assert [len(batch) for batch in batches[:-1]] == [epoch.group] * (len(batches) - 1)
    for number, batch in enumerate(batches):
        assert batch == sorted(batch)
        assert all(abs(each // epoch.group - number) <= epoch.late for each in batch)
        assert order.examples_of(number) == batch
    moved = sum(e // epoch.group < b for b, batch in enumerate(batches) for e in batch)
    assert order.moved == moved


@few(100)
@given(epochs())
def test_without_a_wait_nothing_moves(epoch: Epoch) -> None:
    epoch.ready_at = [0.0] * epoch.total
    order = epoch.order()
    whole = list(range(epoch.total))
    n = epoch.group
    assert epoch.run(order) == [whole[at : at + n] for at in range(0, epoch.total, n)]
    assert order.left_from(0) == {}


@few(100)
@given(epochs(), st.data())
def test_what_was_left_behind_repeats_it(epoch: Epoch, data: st.DataObject) -> None:
    order = epoch.order()
    batches = epoch.run(order)
    epoch.ready_at = data.draw(st.permutations(epoch.ready_at))  # another machine
    left = order.left_from(0)
    epoch.sizes.check(left, 0)
    again = epoch.order()
    again.start_at(0, (), left, order.batches)
    assert epoch.run(again) == batches
    at = data.draw(st.integers(0, len(batches)))
    resumed = epoch.order()
    resumed.start_at(at, order.left_before(at), order.left_from(at), order.decided)
    assert resumed.frontier(at) == order.frontier(at)
    assert epoch.run(resumed) == batches[at:]


@few(60)
@given(epochs(), st.data())
def test_a_resumed_epoch_has_the_rest_whenever_it_comes(epoch: Epoch, data: st.DataObject) -> None:
    order = epoch.order()
    batches = epoch.run(order)
    at = data.draw(st.integers(0, len(batches)))
    resumed = epoch.order()
    resumed.start_at(at, order.left_before(at), {}, at)
    epoch.ready_at = data.draw(st.permutations(epoch.ready_at))
    rest = epoch.run(resumed)
    had = [each for batch in batches[:at] for each in batch]
    assert sorted(had + [each for batch in rest for each in batch]) == list(range(epoch.total))
    for number, batch in enumerate(rest, at):
        assert all(abs(each // epoch.group - number) <= epoch.late for each in batch)
