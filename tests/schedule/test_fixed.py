"""The counted pool, on integers alone: its guarantees as properties."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.basics import compact_integers
from stoker.schedule import rng
from stoker.schedule.factor import EvenUses
from stoker.schedule.pools.fixed import Draw, Pool, pack, unpack
from strategies import factors, few


@dataclass(frozen=True)
class Case:
    counts: EvenUses
    size: int
    group: int
    items: int
    seed: int

    def pool(self, *, known: bool = True) -> Pool:
        key = rng.key(self.seed, 0, rng.ECHO)
        return Pool(self.counts, self.size, self.group, key, self.items if known else None)

    def fits(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "seed"}

    @property
    def promises_distinct(self) -> bool:
        return self.size >= self.counts.most * self.group and self.items >= self.group


@st.composite
def cases(draw: st.DrawFn, max_items: int = 120, max_group: int = 8, min_items: int = 0) -> Case:
    counts = EvenUses(draw(factors))
    group = draw(st.integers(1, max_group))
    size = draw(
        st.one_of(
            st.just(group),
            st.just(counts.most * group),
            st.integers(group, 8 * group + 8),
        )
    )
    items = draw(
        st.one_of(
            st.sampled_from([0, 1, group - 1, group, group + 1, 2 * group - 1, 2 * group, size]),
            st.integers(min_items, max_items),
        )
    )
    return Case(counts, size, group, max(items, min_items), draw(st.integers(0, 2**32)))


@dataclass(frozen=True)
class Step:
    """One draw, with what a model knew of the pool just before it."""

    held_before_admission: int
    admitted: int
    remaining: dict[int, int]
    last_use: dict[int, int]
    draining: bool
    draw: Draw


def steps(case: Case, *, known: bool = True) -> Iterator[Step]:
    """Run a pool to its end, beside a model made of dictionaries."""
    pool = case.pool(known=known)
    remaining: dict[int, int] = {}
    last_use: dict[int, int] = {}
    admitted = 0
    while True:
        before = pool.held
        wanted = pool.fresh_needed()
        arriving = min(wanted, case.items - admitted)
        for n in range(admitted, admitted + arriving):
            remaining[n] = int(case.counts.of(np.array([n]))[0])
        pool.admit(arriving)
        admitted += arriving
        if arriving < wanted:
            pool.end()
        if pool.exhausted:
            break
        state = dict(remaining), dict(last_use), pool.ended
        at = pool.step
        draw = pool.draw()
        for n in draw.ordinals.tolist():
            remaining[n] -= 1
            last_use[n] = at
            if not remaining[n]:
                del remaining[n]
        yield Step(before, arriving, *state, draw)
        # uses = assigned - remaining, at every moment
        assigned = case.counts.of_first(admitted)
        assert pool.uses == assigned - sum(remaining.values())
        assert pool.uses_left == sum(remaining.values())
        assert pool.admitted == admitted
        assert sorted(pool.held_ordinals().tolist()) == sorted(remaining)
        assert pool.held == len(remaining)
    assert admitted == case.items
    assert not remaining


def draws(case: Case, *, known: bool = True) -> list[Draw]:
    return [step.draw for step in steps(case, known=known)]


def plain(draw: Draw) -> tuple[object, ...]:
    """A draw as plain values. (Distances are statistics, and not known right after a restore.)"""
    return draw.ordinals.tolist(), draw.uses.tolist(), draw.last.tolist(), draw.duplicates


@given(cases(), st.booleans())
def test_every_item_is_used_exactly_as_its_count_says_in_draws_of_which_the_last_is_short(
    case: Case, known: bool
) -> None:
    seen: Counter[int] = Counter()
    sizes = []
    for draw in draws(case, known=known):
        sizes.append(len(draw.ordinals))
        for n, use, last in zip(draw.ordinals, draw.uses, draw.last, strict=True):
            assert use == seen[int(n)]
            seen[int(n)] += 1
            assert bool(last) == (seen[int(n)] == case.counts.of(np.array([n]))[0])
    assert [seen[n] for n in range(case.items)] == case.counts.of(np.arange(case.items)).tolist()
    assert all(size == case.group for size in sizes[:-1])
    assert sum(sizes) == case.counts.of_first(case.items)
    assert not sizes or 0 < sizes[-1] <= case.group


@given(cases())
def test_uses_in_a_draw_are_distinct_where_that_is_promised(case: Case) -> None:
    assume(case.promises_distinct)
    for draw in draws(case):
        assert len(set(draw.ordinals.tolist())) == len(draw.ordinals)
        assert draw.duplicates == 0


@given(cases())
def test_elsewhere_there_are_as_few_duplicates_as_the_pool_allows(case: Case) -> None:
    for step in steps(case):
        distinct = len(set(step.draw.ordinals.tolist()))
        assert distinct == min(len(step.draw.ordinals), len(step.remaining))
        assert step.draw.duplicates == len(step.draw.ordinals) - distinct


@given(cases(max_group=1), st.booleans())
def test_single_items_never_repeat_at_once_while_another_is_held(case: Case, known: bool) -> None:
    before = None
    for step in steps(case, known=known):
        drawn = int(step.draw.ordinals[0])
        assert drawn != before or len(step.remaining) == 1
        before = drawn


@given(cases(), st.booleans())
def test_the_pool_grows_by_at_most_one_group_a_step_until_full(case: Case, known: bool) -> None:
    at_draw = 0
    for number, step in enumerate(steps(case, known=known)):
        held = len(step.remaining)
        assert held <= case.size
        assert held == step.held_before_admission + step.admitted
        if case.items >= 2 * case.group or not known:
            assert held <= at_draw + case.group
        if not step.draining:
            # Never less than the integer rule says either: it is no matter of timing.
            assert held == min(case.size, case.group * (number + 1))
        at_draw = held


@given(st.integers(2, 8), factors, st.integers(0, 99))
def test_an_epoch_of_less_than_two_groups_is_admitted_whole(
    group: int, factor: Fraction, seed: int
) -> None:
    for items in range(group + 1, 2 * group):
        first = next(steps(Case(EvenUses(factor), 8 * group, group, items, seed)))
        assert first.admitted == items


@given(cases(max_items=300, max_group=4))
def test_draining_takes_most_remaining_uses_first_and_oldest_use_on_ties(case: Case) -> None:
    base = None
    for number, step in enumerate(steps(case)):
        if not step.draining:
            continue
        if base is None:  # uses before the last snapshot are all alike to the pool
            rows = min(case.size, case.items)
            interval = max(64, (2 if case.group == 1 else 8) * rows // case.group)
            base = number // interval * interval
        drawn = step.draw.ordinals.tolist()
        if len(set(drawn)) < len(drawn):
            continue
        candidates = dict(step.remaining)
        if case.group == 1 and len(candidates) > 1:
            just_used = [n for n in candidates if step.last_use.get(n) == number - 1]
            for n in just_used:
                del candidates[n]
        left = [n for n in candidates if n not in drawn]
        if not left:
            continue
        least_taken = min(candidates[n] for n in drawn)
        assert least_taken >= max(candidates[n] for n in left)
        oldest_left = [
            max(step.last_use.get(n, -2), base - 2) for n in left if candidates[n] == least_taken
        ]
        taken = [
            max(step.last_use.get(n, -2), base - 2) for n in drawn if candidates[n] == least_taken
        ]
        if oldest_left:
            assert max(taken) <= min(oldest_left)


@given(cases())
def test_distances_are_those_between_uses_of_one_item(case: Case) -> None:
    last: dict[int, int] = {}
    for number, draw in enumerate(draws(case)):
        if draw.duplicates:
            return  # several uses in one step have no distance of their own
        known = [n for n in draw.ordinals.tolist() if n in last]
        assert draw.repeats == len(known)
        assert draw.distance_sum == sum(number - last[n] for n in known)
        last |= dict.fromkeys(draw.ordinals.tolist(), number)


@given(cases(max_items=300, max_group=4), st.data())
def test_a_pool_restored_from_a_packed_snapshot_draws_the_same(
    case: Case, data: st.DataObject
) -> None:
    pool = case.pool()
    whole = []
    while pool.fresh_needed() or not pool.exhausted:
        whole.append(plain(pool.advance()))
    at = data.draw(st.integers(0, len(whole)), label="step")
    snapshot = pool.snapshot(at)
    assert snapshot.step <= at
    packed = json.loads(json.dumps(pack(snapshot)))

    restored = case.pool()
    restored.restore(unpack(packed, **case.fits()))
    assert restored.step == snapshot.step
    tail = []
    while restored.fresh_needed() or not restored.exhausted:
        tail.append(plain(restored.advance()))
    assert tail == whole[snapshot.step :]

    # A restored pool can be saved, too, and that state again says the same.
    again = case.pool()
    again.restore(unpack(pack(restored.snapshot(at)), **case.fits()))
    tail = []
    while again.fresh_needed() or not again.exhausted:
        tail.append(plain(again.advance()))
    assert tail == whole[len(whole) - len(tail) :]


@given(cases(max_items=400, max_group=2, min_items=200))
def test_forgetting_keeps_what_later_steps_need(case: Case) -> None:
    pool = case.pool()
    needed = 0
    for number in range(1, case.counts.of_first(case.items) // case.group):
        pool.advance()
        before = pool.snapshot(number)
        pool.forget_before(number)
        assert pool.snapshot(number) is before
        assert before.step >= needed
        needed = before.step


@pytest.mark.parametrize(("size", "group", "bound"), [(32, 1, 64), (150, 1, 300), (200, 4, 400)])
def test_a_restore_replays_a_bounded_number_of_steps(size: int, group: int, bound: int) -> None:
    pool = Case(EvenUses(Fraction(2)), size, group, 4000 * group, 0).pool()
    for number in range(3000):
        assert number - pool.snapshot(number).step < bound
        pool.advance()


@st.composite
def larger_pools(draw: st.DrawFn) -> Case:
    """Draw pools that hold enough groups to be skipped in, with epochs that fill them."""
    group = draw(st.integers(1, 8))
    size = group * draw(st.integers(1, 60)) + draw(st.integers(0, group - 1))
    items = draw(st.integers(0, 5 * size))
    return Case(EvenUses(draw(factors)), size, group, items, draw(st.integers(0, 2**32)))


@few(60)
@given(larger_pools(), st.lists(st.integers(0, 400), min_size=1, max_size=4), st.booleans())
def test_skipping_leaves_a_pool_as_drawing_does(
    case: Case, skips: list[int], restored: bool
) -> None:
    drawn, skipped = case.pool(), case.pool()
    if restored:
        earlier = case.pool()
        while earlier.step < 100 and not earlier.exhausted:
            earlier.advance()
        for pool in (drawn, skipped):
            pool.restore(earlier.snapshot(earlier.step))
    for steps in skips:
        for _ in range(steps):
            if not drawn.exhausted:
                drawn.advance()
        skipped.skip(steps)
        for number in range(0, drawn.step + 1, 16):
            if number >= drawn.snapshot(drawn.step).step:
                assert pack(skipped.snapshot(number)) == pack(drawn.snapshot(number))
        for name in ("step", "admitted", "held", "seen", "uses", "uses_left", "ended", "exhausted"):
            assert getattr(skipped, name) == getattr(drawn, name), name
        for ordinal in (0, drawn.admitted - 1, drawn.admitted):
            assert skipped.uses_of(ordinal) == drawn.uses_of(ordinal)
    while not drawn.exhausted:
        one, other = drawn.advance(), skipped.advance()
        assert plain(one) == plain(other)
        assert one.ages.tolist() == other.ages.tolist()
    assert skipped.exhausted


def test_an_items_uses_are_those_drawn_so_far() -> None:
    pool, seen = Case(EvenUses(Fraction(5, 2)), 20, 2, 70, 3).pool(), Counter[int]()
    while not pool.exhausted:
        seen.update(pool.advance().ordinals.tolist())
        assert [pool.uses_of(n) for n in range(70)] == [seen[n] for n in range(70)]


@few(10)
@given(cases(max_items=100, max_group=5))
def test_a_schedule_depends_on_its_key_alone(case: Case) -> None:
    first, second = draws(case), draws(case)
    assert [plain(d) for d in first] == [plain(d) for d in second]


def test_draws_are_uniform_while_fresh_items_remain() -> None:
    # Of 8 held items, each is in a draw of 2 a quarter of the time; over 4,000 independent
    # draws a count is within 5 deviations of 1,000 (137 to each side), else the draw is not fair.
    drawn: Counter[int] = Counter()
    for seed in range(4000):
        pool = Case(EvenUses(Fraction(100)), 8, 2, 10**6, seed).pool()
        for _ in range(3):
            pool.advance()
        drawn.update(pool.advance().ordinals.tolist())
    assert sorted(drawn) == list(range(8))
    assert all(abs(drawn[n] - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75) for n in drawn)


@given(st.lists(st.integers(0, 10**12), unique=True, max_size=50))
def test_packing_keeps_everything(numbers: list[int]) -> None:
    ascending = np.array(sorted(numbers), np.int64)
    most, stop = len(numbers), max(numbers, default=0) + 1
    assert compact_integers.decode_ascending(
        compact_integers.encode_ascending(ascending, 0), 0, most, stop
    ).tolist() == sorted(numbers)
    text = compact_integers.encode_small(np.array(numbers, np.int64))
    assert compact_integers.decode_small(text, most, stop).tolist() == numbers
    for wrong in ((most - 1, stop), (most, stop - 1)):
        if numbers:
            with pytest.raises(ValueError, match=r"holds more than|holds numbers beyond"):
                compact_integers.decode_small(text, *wrong)


def test_what_is_packed_takes_no_more_memory_than_it_may() -> None:
    bomb = compact_integers.encode_bytes(np.zeros(1 << 25, np.uint8))
    assert len(bomb) < 1 << 17
    tracemalloc.start()
    try:
        for text in (bomb, bomb[:-5], f"{bomb}00000"):
            with pytest.raises(ValueError, match=r"holds more than|cut short, or too long"):
                compact_integers.decode_bytes(text, 1000)
        assert tracemalloc.get_traced_memory()[1] < 64 * len(bomb)
    finally:
        tracemalloc.stop()
