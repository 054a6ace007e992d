"""Factors that ranks agree on: one plan for all, from what each has measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.echoing import rank_sync
from stoker.echoing.rank_sync import UNIT, WINDOW_STEPS, AgreedPolicy
from stoker.engine.items import Planning, WouldBlock
from stoker.schedule.pools.adaptive import AdaptivePool

GROUP = 32
STEP_NS = 10_000_000


class Together:
    """Ranks whose answers are brought together by the test."""

    def __init__(self) -> None:
        self.said: list[list[int]] = []
        self.answer: Callable[[list[int]], list[int]] = lambda values: values

    def largest(self, values: list[int]) -> list[int]:
        self.said.append(values)
        return self.answer(values)


class Upstream:
    """Items that come one after another, at a pace of their own."""

    leaves_out = False

    def __init__(self, total: int, item_ns: float) -> None:
        self.total, self.item_ns = total, item_ns
        self.made, self.taken, self.waited_ns = 0.0, 0, 0
        self.now_ns, self.full_ns = 0, 0

    def pass_time(self, ns: int) -> None:
        """Let ``ns`` go by: at most 8 batches wait."""
        most = min(self.total, self.taken + 8 * GROUP)
        needed_ns = max(0.0, most - self.made) * self.item_ns
        if needed_ns:
            self.full_ns = self.now_ns + int(needed_ns)
        self.made = most if needed_ns <= ns else self.made + ns / self.item_ns
        self.now_ns += ns

    def poll(self, count: int) -> tuple[int, bool]:
        there = int(self.made) - self.taken
        return min(count, there), self.taken + there >= self.total and there <= count

    def wait_for(self, count: int) -> None:
        missing = min(self.taken + count, self.total) - self.made
        if missing > 0:
            self.waited_ns = int(missing * self.item_ns)
            self.made += missing
            self.now_ns += self.waited_ns

    def ready_since(self) -> tuple[int, int | None]:
        there = int(self.made) - self.taken
        return there, self.full_ns if there >= 8 * GROUP else None

    def left_to(self, number: int, taken: int) -> int:
        return number - taken

    def take(self, count: int) -> int:
        got = min(count, self.total - self.taken)
        self.taken += got
        return got


class Rank:
    """One rank of a simulated training task, on a clock of its own."""

    def __init__(self, total: int, item_ns: float) -> None:
        self.ranks = Together()
        self.upstream = Upstream(total, item_ns)
        self.pool = AdaptivePool(4, 8, 16 * GROUP, GROUP)
        self.planning = Planning()
        self.planned = AgreedPolicy(self.ranks, 4, GROUP, total, UNIT, self.planning, leaky=False)  # type: ignore[arg-type]
        self.fresh: list[int] = []
        self.last: dict[int, int] = {}  # the last use of each item
        self.too_close: list[int] = []  # steps that used an item sooner than the distance
        self.waits: list[int] = []


def simulated(
    monkeypatch: pytest.MonkeyPatch,
    item_ns: list[Callable[[int], float]],
    steps: int,
    total: int = 10**6,
    pauses: frozenset[int] = frozenset(),
) -> list[Rank]:
    """Run ranks in step, as gradients that are averaged keep them; return them.

    A hundred steps' time goes by after each of ``pauses``.
    """
    now = [0]
    monkeypatch.setattr(rank_sync.time, "perf_counter_ns", lambda: now[0])
    ranks = [Rank(total, each(0)) for each in item_ns]
    for step in range(steps):
        if ranks[0].planned.due(step):
            mine = []
            for rank in ranks:  # what each would say, then the answer that all of them get
                rank.ranks.answer = lambda values: values
                measured = rank.planned.pop_ratio() if step else UNIT
                mine.append(measured)
            largest = max(mine)
            for rank in ranks:
                rank.ranks.answer = lambda values, factor=largest: [factor, *values[1:]]  # type: ignore[misc]
                rank.planned.agree(step, rank.pool.admitted)
        if ranks[0].planned.over(step):
            break
        waits = []
        for rank, each in zip(ranks, item_ns, strict=True):
            rank.upstream.item_ns = each(step)
            rank.upstream.waited_ns = 0
            with rank.planning.lock:
                code = rank.planned.code(rank.pool, rank.upstream)  # type: ignore[arg-type]
            assert code is not None
            got = rank.upstream.take(rank.pool.fresh_of(code))
            distance = rank.pool.distance
            drawn = rank.pool.draw(code, got).ordinals.tolist()
            if any(step - rank.last.get(n, -step - 99) < distance for n in drawn):
                rank.too_close.append(step)
            rank.last |= dict.fromkeys(drawn, step)
            rank.fresh.append(got)
            rank.waits.append(rank.upstream.waited_ns)
            waits.append(rank.upstream.waited_ns)
        elapsed = STEP_NS + max(waits) + 100 * STEP_NS * (step in pauses)
        for rank, waited in zip(ranks, waits, strict=True):
            rank.planned.note_consumed(
                elapsed - waited
            )  # who has data waits for the others in its step
            rank.upstream.pass_time(elapsed - waited)
        now[0] += elapsed
    return ranks


def per_item(ratio: float) -> float:
    return ratio * STEP_NS / GROUP


def factor(rank: Rank, start: int, stop: int) -> float:
    return (stop - start) * GROUP / max(1, sum(rank.fresh[start:stop]))


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 3.4])
def test_the_slowest_rank_sets_the_factor_of_all(
    monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    paces = [lambda _: per_item(0.5), lambda _: per_item(ratio)]
    fast, slow = simulated(monkeypatch, paces, 6 * WINDOW_STEPS)
    assert fast.fresh == slow.fresh
    at = 2 * WINDOW_STEPS
    assert factor(slow, at, len(slow.fresh)) == pytest.approx(ratio, rel=0.1)
    waited = sum(slow.waits[at:]) / (STEP_NS * (len(slow.waits) - at))
    assert waited < 0.05
    # The largest times, each for itself, would not tell: who waits for a rank seems busy.


def test_a_step_of_latency_is_followed_within_two_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    begins, ends = 5 * WINDOW_STEPS + 7, 10 * WINDOW_STEPS + 7

    def stormy(step: int) -> float:
        return per_item(3.4 if begins <= step < ends else 1.0)

    ranks = simulated(monkeypatch, [lambda _: per_item(0.8), stormy], 14 * WINDOW_STEPS)
    assert ranks[0].fresh == ranks[1].fresh
    late = 2 * WINDOW_STEPS
    assert factor(ranks[1], begins + late, ends) == pytest.approx(3.4, rel=0.1)
    assert factor(ranks[1], ends + late, 14 * WINDOW_STEPS) == pytest.approx(1.0, rel=0.1)


def test_pauses_of_the_consumer_mislead_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 6 * WINDOW_STEPS
    pauses = frozenset(range(100, steps, 50))
    paces = [lambda _: per_item(2.0), lambda _: per_item(1.0)]
    ranks = simulated(monkeypatch, paces, steps, pauses=pauses)
    at = 2 * WINDOW_STEPS
    assert factor(ranks[0], at, steps) == pytest.approx(2.0, rel=0.1)


@given(
    total=st.integers(0, 2_000),
    ratios=st.lists(st.floats(0.1, 6), min_size=1, max_size=4),
)
def test_ranks_take_the_same_steps_and_all_of_their_parts(total: int, ratios: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        paces: list[Callable[[int], float]] = [lambda _, r=r: per_item(r) for r in ratios]  # type: ignore[misc]
        ranks = simulated(patch, paces, 10**6, total)
    assert all(rank.fresh == ranks[0].fresh for rank in ranks)
    assert sum(ranks[0].fresh) == total
    assert all(0 <= fresh <= GROUP for fresh in ranks[0].fresh)
    assert len(ranks[0].fresh) <= 4 * -(-total // GROUP) + 1


@pytest.mark.parametrize("total", [640, 6_400])
@pytest.mark.parametrize("ratio", [1.5, 3.4, 6.0])
def test_copies_are_apart_on_all_ranks_and_the_last_fresh_item_ends_the_epoch(
    monkeypatch: pytest.MonkeyPatch, ratio: float, total: int
) -> None:
    paces = [lambda _: per_item(0.5), lambda _: per_item(ratio)]
    for rank in simulated(monkeypatch, paces, 10**6, total):
        last = len(rank.fresh) - 1
        assert set(rank.too_close) <= {last}
        assert rank.fresh[last]


def test_who_plans_ahead_stops_where_nobody_agreed() -> None:
    planning = Planning()
    planned = AgreedPolicy(Together(), 4, GROUP, None, UNIT, planning, leaky=False)  # type: ignore[arg-type]
    planned.agree(0, 0)
    pool = AdaptivePool(4, 8, 16 * GROUP, GROUP)
    upstream = Upstream(10**6, 0.0)
    upstream.pass_time(1)
    planning.may_block = False

    def plan_ahead() -> None:
        while pool.step < 100:
            code = planned.code(pool, upstream)  # type: ignore[arg-type]
            assert code is not None
            pool.draw(code, upstream.take(pool.fresh_of(code)))
            upstream.pass_time(1)

    with planning.lock, pytest.raises(WouldBlock):
        plan_ahead()
    assert pool.step > 8  # beyond the next boundary: who agrees there is not waited for


def test_parts_of_unequal_length_are_refused() -> None:
    ranks = Together()
    ranks.answer = lambda values: [values[0], 11, -10]
    planned = AgreedPolicy(ranks, 4, GROUP, 10, UNIT, Planning(), leaky=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"between 10 and 11 fresh items.*\.shard\(\)"):
        planned.agree(0, 0)


@given(total=st.integers(0, 5_000), factors=st.lists(st.integers(UNIT, 4 * UNIT), min_size=1))
def test_batches_larger_than_a_byte_can_count_leave_nothing_over(
    total: int, factors: list[int]
) -> None:
    group, ranks, step = 301, Together(), 0
    planning = Planning()
    planned = AgreedPolicy(ranks, 4, group, total, UNIT, planning, leaky=False)  # type: ignore[arg-type]
    pool, upstream = AdaptivePool(4, 8, 16 * group, group), Upstream(total, 0.0)
    upstream.made = total
    while True:
        if planned.due(step):
            factor = factors[step % len(factors)]
            ranks.answer = lambda values, factor=factor: [factor, *values[1:]]  # type: ignore[misc]
            planned.agree(step, pool.admitted)
        if planned.over(step):
            break
        with planning.lock:
            code = planned.code(pool, upstream)  # type: ignore[arg-type]
        if code is None:  # nothing is left to be used again: so it is on all ranks
            break
        pool.draw(code, upstream.take(pool.fresh_of(code)))
        step += 1
    assert pool.admitted == total
