"""The pool that follows the stall, on integers alone: its guarantees as properties.

How well the factor tracks is tried under a simulated clock: nothing here sleeps or waits.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.echoing.adaptive import GreedyPolicy
from stoker.schedule.pools import adaptive
from stoker.schedule.pools.adaptive import ALONE, AdaptivePool, pack, unpack
from stoker.schedule.pools.fixed import Draw
from strategies import few

# -- a model that is obviously right


class Model:
    """The pool as the docs describe it: a dictionary that is sorted at every step."""

    def __init__(self, max_factor: int, min_distance: int, size: int, group: int) -> None:
        self.max_factor, self.size, self.group = max_factor, size, group
        self.longest = max(2, min(min_distance, size // group))
        self.uses: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.step = self.admitted = 0

    def distance(self) -> int:
        """How many steps ago an item must have been used that the next step uses again."""
        whole = max(48, self.longest - 2)
        return 2 + (self.longest - 2) * min(self.step, whole) // whole

    def reusable(self, distance: int | None = None) -> list[int]:
        """Those that have rested, oldest last use first; then least used, then first."""
        latest = self.step + 1 - (distance or self.distance())
        rested = [n for n in self.uses if self.last[n] <= latest]
        return sorted(rested, key=lambda n: (self.last[n], self.uses[n], n))

    def draw(self, fresh: int, *, alone: bool) -> tuple[list[int], list[int], set[int]]:
        """Return what is used, which use of it each is, and what is dropped."""
        entering = range(self.admitted, self.admitted + fresh)
        self.admitted += fresh
        if alone:  # they pass by the pool
            self.step += 1
            return [*entering], [0] * fresh, set()
        again = self.reusable()
        if fresh + len(again) < self.group:  # nothing is to come
            again = self.reusable(2)
        drawn = [*entering, *again[: self.group - fresh]]
        numbers = [self.uses.get(n, 0) for n in drawn]
        self.step += 1
        for n in drawn:
            self.uses[n] = self.uses.get(n, 0) + 1
            self.last[n] = self.step
            if self.uses[n] == self.max_factor:
                del self.uses[n], self.last[n]
        most_used = sorted(self.uses, key=lambda n: (-self.uses[n], self.last[n], n))
        dropped = set(most_used[: max(0, len(self.uses) - self.size)])
        for n in dropped:
            del self.uses[n], self.last[n]
        return drawn, numbers, dropped


@dataclass(frozen=True)
class Case:
    """A pool, and how eager upstream is at each step.

    From 0, what cannot be done without, to 12, a whole step; 13: one that the pool does not keep.
    """

    max_factor: int
    min_distance: int
    size: int
    group: int
    eagerness: tuple[int, ...]

    def pool(self) -> AdaptivePool:
        return AdaptivePool(self.max_factor, self.min_distance, self.size, self.group)

    def code(self, pool: AdaptivePool, eagerness: int) -> int:
        if eagerness == 13:
            return ALONE
        eager = pool.code_of(self.group * eagerness // 12, over=False)
        return max(pool.code_of(pool.needed, over=True), eager)


def fits(pool: AdaptivePool) -> dict[str, int]:
    """Return what is known of a pool when its state is read."""
    size = {"size": pool.size, "group": pool.group, "items": 10**9, "earlier": 0}
    return {"max_factor": pool.max_factor, **size}


@st.composite
def cases(draw: st.DrawFn, max_steps: int = 60, max_group: int = 9, min_steps: int = 0) -> Case:
    max_factor = draw(st.integers(2, 6))
    min_distance = draw(st.sampled_from([2, 3, 8, 100]))
    group = draw(st.integers(1, max_group))
    size = draw(
        st.one_of(
            st.sampled_from([group, 2 * group, max_factor * group]),
            st.integers(group, 8 * group + 8),
        )
    )
    # Stretches of steps that are alike, as times are, among single ones.
    lengths = st.one_of(st.just(1), st.integers(1, 30))
    eagerness: list[int] = []
    wanted = draw(st.integers(min_steps, max_steps))
    while len(eagerness) < wanted:
        eagerness += [draw(st.integers(0, 13))] * draw(lengths)
    return Case(max_factor, min_distance, size, group, tuple(eagerness[:wanted]))


@dataclass(frozen=True)
class Step:
    """One draw, and what was known just before it."""

    code: int
    fresh: int
    first: int
    reusable: int
    draw: Draw


def steps(case: Case, pool: AdaptivePool | None = None) -> Iterator[Step]:
    pool = pool or case.pool()
    for eagerness in case.eagerness:
        code = case.code(pool, eagerness)
        before = pool.admitted, pool.reusable
        draw = pool.draw(code, pool.fresh_of(code))
        yield Step(code, pool.fresh_of(code), *before, draw)


def plain(draw: Draw) -> tuple[object, ...]:
    """A draw as plain values that compare."""
    return (
        draw.ordinals.tolist(),
        draw.uses.tolist(),
        draw.last.tolist(),
        draw.distance_sum,
        draw.repeats,
        draw.duplicates,
        draw.dropped.tolist(),
    )


# -- what is used


@given(cases())
@example(Case(2, 2, 1, 1, (12, 0, 0, 12)))
@example(Case(4, 8, 3, 3, (12,) * 5 + (0,) * 5))
@example(Case(3, 8, 9, 3, (12, 12, 13, 0, 13, 13, 0, 0, 0, 0)))
def test_it_draws_what_the_model_draws(case: Case) -> None:
    model, pool = Model(case.max_factor, case.min_distance, case.size, case.group), case.pool()
    for step in steps(case, pool):
        assert step.reusable == len(model.reusable())
        alone = step.code == ALONE
        drawn, numbers, dropped = model.draw(step.fresh, alone=alone)
        assert step.draw.ordinals.tolist() == drawn
        assert step.draw.uses.tolist() == numbers
        assert step.draw.last.tolist() == [alone or n + 1 == case.max_factor for n in numbers]
        assert set(step.draw.dropped.tolist()) == dropped
        assert sorted(pool.held_ordinals().tolist()) == sorted(model.uses)
        assert (pool.held, pool.step, pool.admitted) == (
            len(model.uses),
            model.step,
            model.admitted,
        )


@given(cases())
def test_every_fresh_item_is_used_in_the_step_it_enters_and_seldom_enough(case: Case) -> None:
    """At most as often as was said, never twice in a step nor in two that follow each other."""
    pool = case.pool()
    seen: Counter[int] = Counter()
    before: set[int] = set()
    for step in steps(case, pool):
        drawn, numbers = step.draw.ordinals.tolist(), step.draw.uses.tolist()
        entering = range(step.first, step.first + step.fresh)
        assert [n for n, use in zip(drawn, numbers, strict=True) if use == 0] == list(entering)
        for n, use in zip(drawn, numbers, strict=True):
            assert use == seen[n]
            seen[n] += 1
        assert pool.uses == sum(seen.values())
        assert len(set(drawn)) == len(drawn) == case.group
        assert not before.intersection(drawn)
        assert step.draw.duplicates == 0
        before = set(drawn)
    assert set(seen) == set(range(pool.admitted))
    assert max(seen.values(), default=0) <= case.max_factor


@given(cases(max_steps=120))
@example(Case(4, 8, 8, 1, (0,) * 120))
@example(Case(4, 100, 120, 1, (12,) + (0,) * 119))
def test_two_uses_of_an_item_are_never_closer_than_the_distance_of_the_step(case: Case) -> None:
    pool = case.pool()
    last: dict[int, int] = {}
    longest = max(2, min(case.min_distance, case.size // case.group))
    whole = max(adaptive.RAMP_STEPS, longest - 2)
    asked = [pool.distance]
    for number, step in enumerate(steps(case, pool)):
        drawn = step.draw.ordinals.tolist()
        assert all(number - last[n] >= asked[-1] for n in drawn if n in last)
        last |= dict.fromkeys(drawn, number)
        asked.append(pool.distance)
    assert asked[0] == 2
    assert all(one <= other <= one + 1 for one, other in itertools.pairwise(asked))
    assert all(distance == longest for distance in asked[whole:])
    assert asked[-1] <= longest


@given(
    st.integers(2, 6),
    st.integers(2, 100),
    st.integers(1, 9),
    st.integers(2, 20),
    st.integers(1, 99),
)
def test_a_full_pool_always_has_a_step_of_copies(
    max_factor: int, min_distance: int, group: int, batches: int, steps: int
) -> None:
    """However small it is: a rule that it cannot meet would make the consumer wait."""
    pool = AdaptivePool(max_factor, min_distance, batches * group, group)
    for _ in range(max(steps, 2 * batches)):
        pool.draw(pool.code_of(group, over=False), group)
    assert pool.held == pool.size
    assert pool.reusable >= group
    assert pool.needed == 0


@given(cases(min_steps=1))
def test_the_last_batch_is_filled_up_with_what_is_there(case: Case) -> None:
    pool = case.pool()
    before: set[int] = set()
    for step in steps(case, pool):
        before = set(step.draw.ordinals.tolist())
    left = [n for n in pool.held_ordinals().tolist() if n not in before]
    assert pool.left_over == len(left)
    drawn = pool.draw(pool.code_of(0, over=True), 0).ordinals.tolist()
    assert len(drawn) == min(case.group, len(left))
    assert set(drawn) <= set(left)


@given(cases())
def test_shares_are_even_and_asked_for_only_where_few_copies_are_left(case: Case) -> None:
    pool = case.pool()
    uses: Counter[int] = Counter()
    for step in steps(case, pool):
        uses.update(step.draw.ordinals.tolist())
        left = sum(case.max_factor - uses[n] for n in pool.held_ordinals().tolist())
        assert pool.copies_left == left
        enough = (pool.distance * (case.max_factor - 1) / 2 + 1) * case.group
        share = case.group / case.max_factor if left <= enough else 0
        assert abs(pool.even_share - share) < 1


@given(cases())
def test_what_is_used_again_is_what_has_rested_longest_and_the_most_used_is_dropped(
    case: Case,
) -> None:
    """A full pool drops the most used, then the oldest."""
    pool = case.pool()
    uses: Counter[int] = Counter()
    last: dict[int, int] = {}
    gone: set[int] = set()
    for number, step in enumerate(steps(case, pool)):
        drawn = set(step.draw.ordinals.tolist())
        left = [last[n] for n in last.keys() - gone - drawn]
        again = [last[n] for n in drawn if n < step.first]
        assert max(again, default=-1) <= min(left, default=number)
        assert step.draw.repeats == len(again)
        assert step.draw.distance_sum == sum(number - at for at in again)
        uses.update(drawn)
        last |= dict.fromkeys(drawn, number)
        kept, dropped = pool.held_ordinals().tolist(), step.draw.dropped.tolist()
        gone |= {*step.draw.ordinals[step.draw.last].tolist(), *dropped}
        assert pool.held == len(kept) <= case.size
        assert not dropped or len(kept) == case.size
        worst = max(((uses[n], -last[n]) for n in kept), default=(0, 0))
        assert all((uses[n], -last[n]) >= worst for n in dropped)
        assert not set(kept) & set(dropped)


@given(cases())
def test_items_of_a_level_stand_in_their_order(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "SNAPSHOT_STEPS", 1)  # to see it at every step
        pool = case.pool()
        uses: Counter[int] = Counter()
        for step in steps(case, pool):
            uses.update(step.draw.ordinals.tolist())
            moment = pool.snapshot(pool.step)
            assert (moment.step, moment.admitted, moment.codes) == (pool.step, pool.admitted, b"")
            assert len(moment.levels) == case.max_factor - 1
            for used, level in enumerate(moment.levels, 1):
                ordinals = [n for stretch in level for n in stretch.ordinals.tolist()]
                assert ordinals == sorted(ordinals)
                assert all(uses[n] == used for n in ordinals)
                after = [stretch.after for stretch in level]
                assert after == sorted(set(after))
            held = pool.held_ordinals().tolist()
            assert moment.oldest == min(held, default=pool.admitted)


@given(cases(max_group=700), st.integers(0, 700))
@example(Case(2, 8, 301, 301, (12, 12)), 301)
@example(Case(4, 8, 511, 511, (0, 12, 12)), 511)
def test_a_code_is_a_byte_and_asks_for_no_more_than_is_ready(case: Case, ready: int) -> None:
    pool = case.pool()
    ready = min(ready, case.group)
    for over in (False, True):
        code = pool.code_of(ready, over=over)
        assert 0 <= code < ALONE == 255
        if over:
            assert pool.fresh_of(code) >= ready  # nothing is left behind at the epoch's end
        else:
            assert ready - pool.grain < pool.fresh_of(code) <= ready
    for _ in steps(case, pool):
        assert 0 <= pool.needed <= case.group
        # What cannot be done without is a whole number of grains, or the whole step.
        assert pool.fresh_of(pool.code_of(pool.needed, over=False)) == pool.needed
        assert pool.needed + pool.reusable >= case.group
        assert pool.needed <= max(0, case.group - pool.reusable) + pool.grain - 1


@given(st.integers(1, 5), st.integers(2, 12), st.integers(2, 5), st.integers(0, 12))
def test_an_epoch_with_less_than_a_group_gives_what_there_is(
    items: int, group: int, max_factor: int, more: int
) -> None:
    items = min(items, group)
    pool = AdaptivePool(max_factor, 8, 4 * group, group)
    draw = pool.draw(pool.code_of(items, over=True), items)
    assert draw.ordinals.tolist() == list(range(items))
    assert pool.uses == pool.held == items
    assert pool.reusable == 0
    assert draw.repeats == draw.duplicates == 0


# -- going back


@given(cases(max_steps=120, min_steps=1), st.data())
def test_restored_from_a_packed_moment_and_its_codes_it_draws_the_same(
    case: Case, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "SNAPSHOT_STEPS", data.draw(st.sampled_from([3, 16, 64])))
        pool = case.pool()
        whole = list(steps(case, pool))
        at = data.draw(st.integers(0, len(whole)), label="step")
        moment = pool.snapshot(at)
        assert at - adaptive.SNAPSHOT_STEPS < moment.step <= at
        codes = bytes(step.code for step in whole)
        assert moment.codes == codes[moment.step :]

        twin = unpack(json.loads(json.dumps(pack(moment))), **fits(pool))
        assert (twin.step, twin.admitted, twin.codes) == (
            moment.step,
            moment.admitted,
            moment.codes,
        )
        assert twin.oldest == moment.oldest
        restored = case.pool()
        restored.restore(twin)
        assert restored.step == restored.first_step == moment.step
        assert restored.uses == moment.step * case.group
        for step in whole[moment.step :]:
            draw = restored.draw(step.code, restored.fresh_of(step.code))
            assert plain(draw) == plain(step.draw)
        for name in ("step", "admitted", "held", "uses", "reusable", "needed", "distance"):
            assert getattr(restored, name) == getattr(pool, name)
        for name in ("copies_left", "even_share", "left_over"):
            assert getattr(restored, name) == getattr(pool, name)
        assert bytes(restored.codes) == codes[moment.step :]

        # A restored pool can be saved, too.
        again = case.pool()
        again.restore(unpack(pack(restored.snapshot(at)), **fits(pool)))
        for step in whole[again.step :]:
            assert plain(again.draw(step.code, again.fresh_of(step.code))) == plain(step.draw)


@few(10)
@given(cases(max_steps=300, min_steps=200, max_group=3))
def test_forgetting_keeps_what_later_steps_need_and_the_record(case: Case) -> None:
    pool = case.pool()
    codes = []
    for number, step in enumerate(steps(case, pool), 1):
        codes.append(step.code)
        before = pool.snapshot(number)
        pool.forget_before(number)
        after = pool.snapshot(number)
        assert (after.step, after.codes) == (before.step, before.codes)
        assert number - after.step < adaptive.SNAPSHOT_STEPS
        assert bytes(pool.codes) == bytes(codes)  # a byte a step, and all of them


@given(cases(min_steps=1), cases(min_steps=1))
def test_carried_into_the_next_epoch_a_pool_draws_as_if_that_went_on(
    one: Case, other: Case
) -> None:
    """But for the numbers of its items and steps."""
    case = replace(one, eagerness=one.eagerness + other.eagerness)
    pool, first = case.pool(), one.pool()
    whole = list(steps(case, pool))
    list(steps(one, first))
    items, last = first.admitted, len(one.eagerness)
    moment = adaptive.carry_over(first, items)
    twin = unpack(
        json.loads(json.dumps(pack(moment))),
        max_factor=one.max_factor,
        size=one.size,
        group=one.group,
        items=10**9,
        earlier=items,
    )
    second = one.pool()
    second.restore(twin)
    for step in whole[last:]:
        draw = second.draw(step.code, second.fresh_of(step.code))
        assert (draw.ordinals + items).tolist() == step.draw.ordinals.tolist()
        assert plain(draw)[1:6] == plain(step.draw)[1:6]
        assert (draw.dropped + items).tolist() == step.draw.dropped.tolist()
    for name in ("held", "reusable", "needed", "distance", "copies_left", "left_over"):
        assert getattr(second, name) == getattr(pool, name)


@given(cases(min_steps=1), st.data())
def test_what_is_let_go_is_gone_and_nothing_else(case: Case, data: st.DataObject) -> None:
    pool = case.pool()
    list(steps(case, pool))
    held = pool.held_ordinals().tolist()
    gone = set(data.draw(st.lists(st.sampled_from(held), unique=True))) if held else set()
    pool.discard(gone)
    assert pool.held_ordinals().tolist() == [n for n in held if n not in gone]
    assert pool.held == len(held) - len(gone)
    again = case.pool()
    again.restore(adaptive.AdaptiveSnapshot(pool.step, pool.admitted, pool.levels))
    for name in ("held", "reusable", "needed", "copies_left", "left_over", "even_share"):
        assert getattr(again, name) == getattr(pool, name)


def full_size(group: int, ratio: float, jitter: float) -> AdaptivePool:
    """Return a pool of 65,536 in its steady state."""
    size = 65_536
    pool = AdaptivePool(4, 8, size, group)
    rng = np.random.default_rng(5)
    for _ in range(7 * size // group):
        ready = round(group / ratio * math.exp(jitter * rng.standard_normal()))
        ready = min(group, max(ready, pool.needed))
        code = pool.code_of(ready, over=False)
        pool.draw(code, pool.fresh_of(code))
    return pool


@pytest.mark.parametrize(
    ("group", "ratio", "jitter"), [(256, 3.0, 0.5), (256, 1.5, 0.0), (600, 3.0, 1.0)]
)
def test_a_packed_pool_takes_at_most_a_byte_an_item_and_4_kb(
    group: int, ratio: float, jitter: float
) -> None:
    pool = full_size(group, ratio, jitter)
    assert pool.held > 0.9 * pool.size
    for at in (pool.step, pool.step // 64 * 64 - 1):  # a few codes, or all there can be
        packed = json.dumps(pack(pool.snapshot(at)))
        assert len(packed) <= pool.size + 4096


def test_a_damaged_pool_is_noticed() -> None:
    pool = full_size(600, 3.0, 0.5)
    packed = pack(pool.snapshot(pool.step))
    for wrong in (
        {**packed, "levels": ["?"]},
        {**packed, "levels": [packed["levels"][0].replace(" ", "")]},
        {**packed, "levels": [" ".join([*packed["levels"][0].split(" ")[:2], ":"])]},
        {**packed, "step": "soon"},
    ):
        with pytest.raises((ValueError, TypeError)):
            unpack(wrong, **fits(pool))
    with pytest.raises(KeyError):
        unpack({k: v for k, v in packed.items() if k != "codes"}, **fits(pool))


# -- how the factor tracks: a clock that is but a number

WINDOW = 8  # batches that may be ready


@dataclass
class Upstream:
    """Makes chunks one after another, no further ahead than the window; costs are simulated.

    Attributes:
        cost: the time that the chunk begun at a moment takes, as ``cost(moment)``.
        capacity: items that may be ready or in the making.
        items: fresh items in the epoch, None for no end.
        now: the time of whoever asks; waiting moves it.
    """

    cost: Callable[[float], float]
    capacity: int
    chunk: int
    items: int | None = None
    now: float = 0.0
    made: int = 0
    taken: int = 0
    spent: list[float] = field(default_factory=list)  # on each chunk
    _due: float | None = None  # when the chunk in the making is there
    _free_at: float = 0.0  # since when the next one may be begun
    _pending: deque[float] = field(default_factory=deque)

    def _advance(self) -> None:
        """Make what is made by now."""
        while True:
            if self._due is None:
                full = self.made - self.taken + self.chunk > self.capacity
                if full or (self.items is not None and self.made >= self.items):
                    return
                self.spent.append(self.cost(self._free_at))
                self._due = self._free_at + self.spent[-1]
            if self._due > self.now:
                return
            self.made += self.chunk
            self._free_at, self._due = self._due, None

    def poll(self, count: int) -> tuple[int, bool]:
        self._advance()
        ready = self.made - self.taken
        return min(ready, count), self.items is not None and self.taken + count >= self.items <= (
            self.made
        )

    def wait_for(self, count: int) -> None:
        self._advance()
        while self.made - self.taken < count and self._due is not None:
            self.now = max(self.now, self._due)
            self._advance()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more."""
        self._advance()
        return self.made - self.taken + self.chunk > self.capacity

    def take(self, count: int) -> int:
        """Take what was ready; room for more begins now."""
        full = self._due is None
        count = min(count, self.made - self.taken)
        self.taken += count
        if full and count:
            self._free_at = max(self._free_at, self.now)
        self._advance()
        return count


@dataclass
class Ran:
    """What came of a simulated run, step by step."""

    group: int
    chunk: int
    spent: list[float]  # on each chunk that was made
    fresh: list[int] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)  # means; 0 in steps without copies

    def factor(self, start: int, stop: int) -> float:
        """Uses per fresh item in some steps."""
        return self.group * (stop - start) / max(1, sum(self.fresh[start:stop]))

    def ratio(self, start: int, stop: int) -> float:
        """R as it was: what the fresh items used in some steps took to make."""
        first, behind = (sum(self.fresh[:at]) // self.chunk for at in (start, stop))
        return sum(self.spent[first:behind]) / (behind - first) * self.group / self.chunk

    def factors(self, start: int, stop: int, window: int) -> list[float]:
        """The factor in every window between two steps."""
        return [self.factor(at, at + window) for at in range(start, stop - window + 1)]

    def wait_share(self, start: int, stop: int) -> float:
        waited = sum(self.waited[start:stop])
        return waited / (waited + stop - start)


def simulated(
    ratio: Callable[[int], float],
    steps: int,
    *,
    group: int = 32,
    max_factor: int = 4,
    min_distance: int = 8,
    sigma: float = 0.0,
    seed: int = 0,
    pauses: dict[int, float] | None = None,
    first: float = 0.0,
    items: int | None = None,
    whole_batches: bool = False,
) -> Ran:
    """Run a consumer whose steps take a second each against simulated upstream work.

    Args:
        ratio: R at a step of the consumer.
        sigma: of the lognormal jitter of each chunk's time; its mean stays.
        pauses: seconds that the consumer is away before some steps.
        first: seconds that upstream takes to start up.
    """
    pool, demand = AdaptivePool(max_factor, min_distance, 16 * group, group), GreedyPolicy()
    rng = np.random.default_rng(seed)
    chunk = group if whole_batches else max(1, group // 8)
    step = 0

    def cost(_: float) -> float:
        noise = math.exp(sigma * rng.standard_normal() - sigma**2 / 2) if sigma else 1.0
        return ratio(step) * chunk / group * noise

    upstream = Upstream(cost, WINDOW * group, chunk, items, _free_at=first)
    watched: Any = upstream
    ran = Ran(group, chunk, upstream.spent)
    for step in range(steps):
        upstream.now += (pauses or {}).get(step, 0.0)
        asked = upstream.now
        code = demand.code(pool, watched)
        if code is None:
            break
        ran.waited.append(upstream.now - asked)
        ran.at.append(upstream.now)
        got = upstream.take(pool.fresh_of(code))
        draw = pool.draw(code, got)
        assert got == pool.fresh_of(code) or items is not None
        assert len(draw.ordinals) == group or items is not None
        ran.fresh.append(got)
        ran.distances.append(draw.distance_sum / max(1, draw.repeats))
        upstream.now += 1.0
    return ran


def within(factors: list[float], wanted: float, share: float = 0.1) -> bool:
    return all(abs(factor - wanted) <= share * wanted for factor in factors)


@pytest.mark.parametrize("high", [1.5, 3.4, 4.0])
@pytest.mark.parametrize("group", [8, 32, 256])
def test_a_step_of_latency_is_followed_within_20_batches_and_then_without_swings(
    high: float, group: int
) -> None:
    ran = simulated(lambda step: high if 300 <= step < 700 else 1.0, 1000, group=group)
    assert within(ran.factors(20, 300, 20), 1.0)
    assert within(ran.factors(320, 700, 20), high)
    assert within(ran.factors(720, 1000, 20), 1.0)
    if high <= 0.85 * 4:
        assert ran.wait_share(2, 1000) < 0.05


@pytest.mark.parametrize("whole_batches", [False, True])
@pytest.mark.parametrize("high", [1.5, 2.0, 3.4])
def test_single_items_and_whole_batches_are_followed_too(high: float, whole_batches: bool) -> None:
    # A batch is there or it is not, so that 20 steps are too few to tell fractions.
    ran = simulated(
        lambda step: high if 300 <= step < 900 else 1.0,
        1200,
        group=16 if whole_batches else 1,
        whole_batches=whole_batches,
    )
    assert within(ran.factors(20, 300, 50), 1.0)
    assert within(ran.factors(320, 900, 100), high)
    assert within(ran.factors(920, 1200, 50), 1.0)
    assert ran.wait_share(10, 1200) < 0.05


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ratio", [1.3, 2.0, 3.4])
def test_under_jitter_every_window_of_100_batches_is_within_10_percent(
    ratio: float, seed: int
) -> None:
    ran = simulated(lambda _: ratio, 1000, sigma=0.5, seed=seed)
    for at in range(20, 900, 7):  # of what was, for chance moves the mean of a window, too
        assert within([ran.factor(at, at + 100)], ran.ratio(at, at + 100))
    assert within([ran.factor(20, 1000)], ratio, 0.05)
    assert ran.wait_share(20, 1000) < 0.05


@pytest.mark.parametrize("seed", range(2))
def test_a_drift_is_followed(seed: int) -> None:
    def ratio(step: int) -> float:
        return 1.2 + 2.2 * step / 2000

    for sigma in (0.0, 0.5):
        ran = simulated(ratio, 2000, sigma=sigma, seed=seed)
        for at in range(20, 1900, 7):
            followed = ran.factor(at, at + 100)
            assert within([followed], ran.ratio(at, at + 100))
            assert sigma or within([followed], ratio(at + 50))
        assert ran.wait_share(20, 2000) < 0.05


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ratio", [0.1, 0.6, 0.9])
def test_where_upstream_is_faster_nothing_is_echoed(ratio: float, sigma: float) -> None:
    ran = simulated(lambda _: ratio, 600, sigma=sigma, seed=1)
    assert ran.factor(20, 600) < 1.01
    assert within(ran.factors(20, 600, 100), 1.0, 0.05)


@pytest.mark.parametrize("max_factor", [2, 3, 4])
@pytest.mark.parametrize("share", [0.5, 0.85])
def test_the_consumer_hardly_waits_up_to_85_percent_of_the_most(
    max_factor: int, share: float
) -> None:
    for sigma in (0.0, 0.5):
        ran = simulated(lambda _: share * max_factor, 800, max_factor=max_factor, sigma=sigma)
        assert ran.wait_share(10, 800) < 0.05
        assert ran.wait_share(0, 800) < 0.05


@pytest.mark.parametrize(("ratio", "max_factor"), [(6.0, 4), (5.0, 2), (20.0, 3)])
def test_above_the_most_the_factor_goes_there_and_the_wait_is_what_is_left(
    ratio: float, max_factor: int
) -> None:
    ran = simulated(lambda _: ratio, 900, max_factor=max_factor)
    assert within(ran.factors(100, 900, 100), max_factor)
    assert ran.wait_share(100, 900) == pytest.approx(1 - max_factor / ratio, rel=0.1)


def test_above_the_most_the_stock_of_the_pool_is_used_first() -> None:
    ran = simulated(lambda step: 6.0 if step >= 300 else 1.0, 1200)
    stock = 300 + 16 * 3 + 8  # what was used once, three times more; and the window
    assert ran.wait_share(300, 330) == 0.0
    assert max(ran.factors(312, stock, 20)) <= 6.5
    assert within(ran.factors(420, 1200, 20), 4.0)


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
@pytest.mark.parametrize("ratio", [4.0, 5.0, 8.0])
def test_copies_stay_apart_where_the_pool_runs_short(
    ratio: float, sigma: float, group: int
) -> None:
    ran = simulated(lambda _: ratio, 600, sigma=sigma, group=group)
    assert min(filter(None, ran.distances[48:])) >= 8
    assert ran.wait_share(100, 600) == pytest.approx(1 - 4 / ratio, abs=0.06)
    assert within([ran.factor(100, 600)], 4.0, 0.05)
    less = simulated(lambda _: ratio, 600, sigma=sigma, group=group, min_distance=2)
    # The reserve: it is filled once, and then costs nothing.
    reserve = ratio * (8 * 3 / 4 + 1)
    assert sum(ran.waited) - sum(less.waited) <= reserve + 0.06 * ratio * 100


@pytest.mark.parametrize("min_distance", [2, 8])
@pytest.mark.parametrize("ratio", [5.0, 6.0])
def test_above_the_most_waiting_has_no_swings(ratio: float, min_distance: int) -> None:
    ran = simulated(lambda step: ratio if step >= 300 else 1.0, 1200, min_distance=min_distance)
    assert within(ran.factors(500, 1200, 8), 4.0, 0.05)


def test_pauses_of_the_consumer_mislead_nobody() -> None:
    pauses = dict.fromkeys(range(200, 1000, 200), 60.0)
    ran = simulated(lambda _: 2.5, 1000, pauses=pauses)
    for start in range(200, 1000, 200):
        # What was made meanwhile is used at once, then all is as before.
        assert sum(ran.fresh[start : start + 12]) >= WINDOW * ran.group
        assert within(ran.factors(start + 20, start + 200, 20), 2.5)
    assert ran.wait_share(2, 1000) < 0.05
    ran = simulated(lambda _: 0.9, 1000, pauses=pauses)
    assert ran.factor(2, 1000) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("ratio", [0.9, 2.5, 3.4])
def test_a_slow_start_up_misleads_nobody(ratio: float) -> None:
    ran = simulated(lambda _: ratio, 400, first=300.0)
    assert ran.waited[0] > 300.0
    assert within(ran.factors(20, 400, 20), max(1.0, ratio))
    assert ran.wait_share(1, 400) < 0.05


@few(15)
@given(
    st.integers(0, 700),
    st.sampled_from([1, 5, 16]),
    st.integers(2, 5),
    st.sampled_from([0.4, 1.0, 2.3, 9.0]),
)
def test_an_epoch_ends_behind_its_last_fresh_item(
    items: int, group: int, max_factor: int, ratio: float
) -> None:
    chunk = max(1, group // 8)
    items = items // chunk * chunk
    ran = simulated(lambda _: ratio, 10**6, group=group, max_factor=max_factor, items=items)
    assert sum(ran.fresh) == items
    assert not ran.fresh or ran.fresh[-1]
    assert len(ran.fresh) * group <= max_factor * items + group
