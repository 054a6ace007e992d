"""``.late(k).batch(n)``: examples that are not ready move on, and a run can be repeated exactly.

Each comes once, never far from its place, and decisions repeat.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.stages.late import LateOrder, Sizes
from strategies import few, through_json

LONG_S = 60.0


@stoker.thread_safe
class Gates:
    """A function that holds some examples until they are let through."""

    def __init__(self, *held: int) -> None:
        self._gates = {each: threading.Event() for each in held}

    def __call__(self, x: Any) -> Any:
        gate = self._gates.get(int(x))
        assert gate is None or gate.wait(LONG_S)
        return x

    def open(self, example: int) -> None:
        self._gates[example].set()

    def open_all(self) -> None:
        for gate in self._gates.values():
            gate.set()


def numbers(n: int = 20) -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(n), seed=0)


def rows(pipeline: Any) -> list[list[int]]:
    return [batch.tolist() for batch in pipeline]


def test_a_late_example_moves_on_and_is_waited_for_at_the_end() -> None:
    gates = Gates(2)
    train = numbers(14).map(gates).late(2).batch(4).workers(2, kind="thread")
    assert len(train) == 4
    with iter(train) as batches:
        first = [next(batches).tolist() for _ in range(2)]
        assert first == [[0, 1, 3, 4], [5, 6, 7, 8]]
        gates.open(2)
        assert rows(batches) == [[2, 9, 10, 11], [12, 13]]
    assert train.stats().late_examples == 1
    assert "late: 1 example" in str(train.stats())
    record = through_json(train.record())
    for again in (train.workers(3, kind="thread"), train.workers(0)):
        replayed = numbers(14).map(Gates()).late(2).batch(4).replay(record)
        replayed = replayed.workers(again.chain.workers_here().count)
        assert rows(replayed) == [*first, [2, 9, 10, 11], [12, 13]]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    group, late, total = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(5, 24))
    held = draw(st.lists(st.integers(0, total - 1), max_size=2, unique=True))
    opened = {each: each // group + draw(st.integers(0, late)) for each in held}
    return {
        "group": group,
        "late": late,
        "total": total,
        "opened": opened,
        "drop_last": draw(st.booleans()),
        "saved": draw(st.integers(0, max(0, total // group - 1))),
    }


@few(12)
@given(cases())
def test_each_comes_once_and_a_resumed_run_is_repeated(case: dict[str, Any]) -> None:
    group, late, total = case["group"], case["late"], case["total"]
    gates = Gates(*case["opened"])

    def build(function: Any, replay: Any = None) -> stoker.Pipeline[Any]:
        pipeline = numbers(total).map(function)
        pipeline = pipeline.late(late).batch(group, drop_last=case["drop_last"])
        return pipeline if replay is None else pipeline.replay(replay)

    train = build(gates).workers(3, kind="thread")
    batches, state = [], train.state_dict()
    kept = total - total % group if case["drop_last"] else total
    opened_at: dict[int, int] = {}
    try:
        with iter(train) as running:
            for number in range(len(train)):
                if number == case["saved"]:
                    state = through_json(train.state_dict())
                closed = [each for each, batch in case["opened"].items() if batch > number]
                reach = min(kept, (number + 1 + late) * group)
                missing = sum(each < reach for each in closed)
                if reach - number * group - missing < min(group, kept - number * group):
                    closed.clear()  # else the batch could not be made
                for each in case["opened"].keys() - closed:
                    opened_at.setdefault(each, number)
                    gates.open(each)
                batches.append(next(running).tolist())
            gates.open_all()
            assert next(running, None) is None
    finally:
        gates.open_all()
    assert sorted(each for batch in batches for each in batch) == list(range(kept))
    for number, batch in enumerate(batches):
        assert all(abs(each // group - number) <= late for each in batch)
        for each, opened in opened_at.items():
            assert each not in batch or number >= opened
    record = through_json(train.record())
    assert rows(build(Gates(), record).workers(2, kind="thread")) == batches
    resumed = build(Gates(), record).workers(0)
    resumed.load_state_dict(state)
    assert rows(resumed) == batches[case["saved"] :]
    alone = build(Gates()).workers(0)
    alone.load_state_dict(state)
    rest = [each for batch in rows(alone) for each in batch]
    had = [each for batch in batches[: case["saved"]] for each in batch]
    assert sorted(had + rest) == list(range(kept))


def draw_on(x: Any, rng: np.random.Generator) -> Any:
    return x, rng.integers(1 << 30)


def test_an_example_is_the_same_in_whatever_batch_it_comes() -> None:
    gates = Gates(3)

    def build(function: Any, late: int) -> stoker.Pipeline[Any]:
        train = numbers().shuffle().map(function).random_map(draw_on)
        return (train.late(late) if late else train).batch(4)

    def pairs(batches: Any) -> dict[int, int]:
        return {x: y for xs, ys in batches for x, y in zip(xs.tolist(), ys.tolist(), strict=True)}

    with iter(build(gates, 1).workers(2, kind="thread")) as running:
        first = next(running)
        gates.open(3)
        assert pairs([first, *running]) == pairs(build(Gates(), 0).workers(0))


def test_without_workers_nothing_is_late() -> None:
    train = numbers().shuffle().late(2).batch(3).workers(0)
    assert rows(train) == rows(numbers().shuffle().batch(3).workers(0))
    assert train.stats().late_examples == 0


def test_ranks_take_equally_many_steps() -> None:
    seen: list[int] = []
    for rank in range(2):
        gates = Gates(4)
        train = (
            numbers(22)
            .shard(rank=rank, world_size=2)
            .map(gates)
            .late(1)
            .batch(3)
            .workers(2, kind="thread")
        )
        assert len(train) == 4
        with iter(train) as running:
            batches = [next(running).tolist()]
            gates.open(4)
            batches += rows(running)
        assert [len(batch) for batch in batches] == [3, 3, 3, 2]
        seen += [each for batch in batches for each in batch]
    assert sorted(seen) == list(range(22))


def test_a_failed_example_is_an_error_of_its_batch() -> None:
    def fail(x: Any) -> Any:
        if x == 5:
            raise ValueError("a bad one")
        return x

    with pytest.raises(stoker.StageError, match="on example 5"):
        rows(numbers().map(fail).late(1).batch(4).workers(2, kind="thread"))


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.full
def test_a_run_with_any_workers_is_repeated_by_others(kind: str) -> None:
    def build() -> stoker.Pipeline[Any]:
        return numbers(200).shuffle().map(_unequal).late(2).batch(8)

    for _ in range(3):
        train = build().workers(3, kind=kind)
        batches = rows(train)
        assert sorted(each for batch in batches for each in batch) == list(range(200))
        record = through_json(train.record())
        assert rows(build().replay(record).workers(2, kind="process")) == batches
        assert rows(build().replay(record).workers(0)) == batches


def test_all_of_a_record_can_be_replayed_whatever_is_planned_ahead() -> None:
    def build() -> stoker.Pipeline[Any]:
        return numbers(200).late(2).batch(8)

    train = build().workers(0)
    with iter(train) as batches:
        recorded = [next(batches).tolist() for _ in range(5)]
    with iter(build().replay(train.record()).workers(1, timeout_s=60)) as batches:
        assert [next(batches).tolist() for _ in range(5)] == recorded
        with pytest.raises(stoker.StateError, match="the record ends at batch 5"):
            next(batches)


def _unequal(x: Any) -> Any:
    for _ in range(20_000 if x % 5 == 0 else 500):
        pass
    return x


@pytest.mark.parametrize("workers", [0, 2])
def test_the_record_of_a_resumed_run_is_replayed_from_its_own_state(workers: int) -> None:
    gates = Gates(2, 9)

    def build(function: Any) -> stoker.Pipeline[Any]:
        return numbers(24).map(function).late(2).batch(4)

    train = build(gates).workers(2)
    with iter(train) as batches:
        assert 2 not in next(batches)
        state = through_json(train.state_dict())
        gates.open_all()
    gates = Gates(9)
    resumed = build(gates).workers(2)
    resumed.load_state_dict(state)
    with iter(resumed) as batches:
        rest = [next(batches).tolist() for _ in range(3)]
        gates.open_all()
    record = through_json(resumed.record())
    again = build(Gates()).replay(record).workers(workers)
    again.load_state_dict(state)
    with iter(again) as batches:
        assert [next(batches).tolist() for _ in range(3)] == rest
    with pytest.raises(stoker.StateError, match="the record begins at batch 1: load the state"):
        next(iter(build(Gates()).replay(record).workers(workers)))


def test_a_record_of_another_pipeline_is_refused() -> None:
    train = numbers().late(1).batch(4).workers(0)
    rows(train)
    record = train.record()
    with pytest.raises(stoker.StateError, match="another pipeline"):
        rows(numbers().late(1).batch(5).replay(record))
    again = numbers().late(1).batch(4).replay(record)
    again.set_epoch(1)
    with pytest.raises(stoker.StateError, match="no epoch 1"):
        rows(again)
    record["late"]["0"]["left"] = {"2": [3]}
    with pytest.raises(stoker.StateError, match="damaged"):
        rows(numbers().late(1).batch(4).replay(record))


def test_other_ranks_cannot_go_on_with_it() -> None:
    train = numbers(24).shard(rank=0, world_size=2).late(1).batch(3).workers(0)
    with iter(train) as running:
        next(running)
        state = train.state_dict()
    other = numbers(24).shard(rank=0, world_size=3).late(1).batch(2)
    with pytest.raises(stoker.StateError):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: numbers().late(-1).batch(4), "number of batches"),
        (lambda: numbers().late(1).map(int).batch(4), "right before .batch"),
        (lambda: numbers().batch(4).late(1), "put it before .batch"),
        (lambda: rows(numbers().late(1)), "put .batch"),
        (lambda: numbers(6).late(1).bucket(2, [0] * 6), "plans its batches ahead"),
        (lambda: numbers().filter(bool).late(1).batch(4), "waits for each"),
        (lambda: numbers().map(int, max_errors=1).late(1).batch(4), "waits for each"),
        (lambda: numbers().echo(2).late(1).batch(4), "decides on numbers alone"),
        (lambda: rows(numbers().late(1).batch(4).echo(2)), "without .late"),
        (lambda: stoker.from_iterable([1, 2]).late(1).batch(4), "a stream has one order"),
        (lambda: numbers().late(1).batch(4).replay({}), "no record"),
    ],
)
def test_what_it_cannot_do_is_refused(build: Any, message: str) -> None:
    with pytest.raises((ValueError, stoker.StateError), match=message):
        build()


# -- decisions alone, on a clock of the test's own


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
