"""How many threads take part, by what was measured; no thread runs here."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.workers.cost import IMAGE_ROW_NS, INLINE_BATCH_NS, CostEstimate
from stoker.engine.workers.tuning import Autotuner, Tuning, choose_threads

CHEAP = INLINE_BATCH_NS / 2
COSTLY = 4 * INLINE_BATCH_NS


@pytest.mark.parametrize(
    ("work_ns", "inline_ns", "threads"),
    [
        ({4: 1.1 * COSTLY, 1: COSTLY}, COSTLY, 4),  # four are nearly four times as fast
        ({4: 4.0 * COSTLY, 1: COSTLY}, COSTLY, 1),  # they only wait for each other
        ({4: 3.5 * COSTLY, 1: COSTLY}, COSTLY, 4),  # clearly faster
        ({4: 3.7 * COSTLY, 1: COSTLY}, COSTLY, 1),  # faster, but not clearly
        ({4: COSTLY}, COSTLY, 4),  # they slept: one alone was not tried
        ({1: COSTLY}, COSTLY, 4),  # tried alone, on other work: nothing to compare with
        ({4: 4.0 * CHEAP, 1: CHEAP}, CHEAP, 0),  # cheap, and no faster with threads
        ({4: 1.2 * CHEAP, 1: CHEAP}, CHEAP, 4),  # cheap, and faster all the same
        ({4: 8.0 * CHEAP, 1: 0.5 * CHEAP}, CHEAP, 1),  # one thread is faster than the consumer
        ({4: 40.0 * CHEAP}, CHEAP, 0),
        ({4: 4.0 * CHEAP, 1: CHEAP}, 0.0, 1),  # the consumer never did it
    ],
)
def test_threads_are_chosen_by_what_a_batch_takes(
    work_ns: dict[int, float], inline_ns: float, threads: int
) -> None:
    assert choose_threads(4, work_ns, inline_ns) == threads


@pytest.mark.parametrize(
    ("own_ns", "period_ns", "threads"),
    [
        (0.0, CHEAP, 0),  # it only waits for them
        (0.5 * CHEAP, CHEAP, 1),  # a third is hidden
        (5.0 * CHEAP, 5.0 * CHEAP, 1),  # all of it
        (5.0 * CHEAP, 5.5 * CHEAP, 1),
        (5.0 * CHEAP, 6.0 * CHEAP, 0),  # as slow as if it did it itself: they take the GIL from it
        (5.0 * CHEAP, 9.0 * CHEAP, 1),  # not by what they did
    ],
)
def test_work_is_hidden_behind_the_consumers_own(
    own_ns: float, period_ns: float, threads: int
) -> None:
    assert choose_threads(4, {4: 4 * CHEAP, 1: CHEAP}, CHEAP, own_ns, period_ns) == threads


times = st.floats(1.0, 1e9)


@given(st.integers(2, 64), times, times, times | st.just(0.0))
def test_nothing_clearly_slower_is_chosen(
    limit: int, many_ns: float, one_ns: float, inline_ns: float
) -> None:
    takes_ns = {limit: many_ns / limit, 1: one_ns}
    chosen = choose_threads(limit, {limit: many_ns, 1: one_ns}, inline_ns)
    if 0 < inline_ns < INLINE_BATCH_NS:
        takes_ns[0] = inline_ns
    assert chosen in takes_ns
    assert 0.9 * takes_ns[chosen] <= min(takes_ns.values()) / 0.9


def test_what_was_learnt_while_a_cache_was_filled_is_forgotten() -> None:
    autotuner = Autotuner()
    autotuner.begin_epoch(0)
    filled = autotuner.cost(0, 32)
    filled.note(32, int(COSTLY))
    autotuner.settle(4)
    autotuner.factor = 2
    autotuner.begin_epoch(100)  # all examples were missing in the epoch before
    assert (autotuner.active, autotuner.is_settled) == (None, False)
    assert autotuner.cost(0, 32).row_ns is None
    autotuner.settle(1)
    autotuner.begin_epoch(100)  # none was
    assert (autotuner.active, autotuner.factor) == (1, 2)


@pytest.mark.parametrize(("row_ns", "at_once"), [(2 * IMAGE_ROW_NS, True), (30_000, False)])
def test_what_needs_no_gil_takes_all_threads_without_a_trial(row_ns: int, at_once: bool) -> None:
    autotuner = Autotuner()
    cost = autotuner.cost(0, 64)
    cost.releases_gil, cost.gil_row_ns = True, IMAGE_ROW_NS
    tuning = Tuning(4, autotuner)
    for _ in range(2):  # what the first piece costs decides nothing
        cost.note(100, 100 * row_ns)
    assert tuning.note(cost, 200, 200 * row_ns, 0)
    assert tuning.active == 4
    assert tuning.is_over is at_once


@pytest.mark.parametrize(
    ("own_fraction", "pause_fraction", "delay_fraction", "threads"),
    [
        (0.0, 0.0, 0.0, 0),
        (0.5, 0.0, 0.0, 0),
        (2.0, 0.0, 0.0, 4),
        (20.0, 0.0, 0.0, 4),
        (0.0, 20_000.0, 0.0, 0),
        (0.5, 20_000.0, 0.0, 0),
        (2.0, 20_000.0, 0.0, 4),
        (0.0, 0.0, 20.0, 0),
        (0.5, 0.0, 20.0, 0),
        (2.0, 0.0, 20.0, 4),
    ],
)
def test_threads_are_tried_where_the_consumer_does_something_else(
    own_fraction: float, pause_fraction: float, delay_fraction: float, threads: int
) -> None:
    """Between two batches, not in a pause now and then, nor where others have the processor."""
    autotuner, clock, delay = Autotuner(), [0], [0]
    cost = autotuner.cost(0, 32)
    tuning = Tuning(4, autotuner, lambda: clock[0], delay_ns=lambda: delay[0])
    for number in range(200):
        clock[0] += int(CHEAP)
        cost.note(32, int(CHEAP))
        if tuning.note(cost, 32, int(CHEAP)):
            break
        tuning.made_here(1, int(CHEAP))
        delay[0] += int(delay_fraction * CHEAP)
        clock[0] += int((own_fraction + delay_fraction) * CHEAP)
        if number % 50 == 20:
            clock[0] += int(pause_fraction * CHEAP)
    assert tuning.active == threads


@pytest.mark.parametrize(("held_up", "threads"), [(0.9, 0), (0.0, 4)])
def test_a_batch_costs_no_more_where_others_have_the_processor(
    held_up: float, threads: int
) -> None:
    autotuner, clock, delay = Autotuner(), [0], [0]
    cost = autotuner.cost(0, 32)
    tuning = Tuning(4, autotuner, lambda: clock[0], delay_ns=lambda: delay[0])
    for _ in range(50):
        clock[0] += int(COSTLY)
        delay[0] += int(held_up * COSTLY)
        cost.note(32, int(COSTLY))
        if tuning.note(cost, 32, int(COSTLY)):
            break
        tuning.made_here(1, int(COSTLY))
    assert tuning.active == threads


def test_the_engines_own_work_is_not_something_else() -> None:
    """Nor are batches that are made without a task."""
    autotuner, clock = Autotuner(), [0]
    cost = autotuner.cost(0, 32)
    tuning = Tuning(4, autotuner, lambda: clock[0])
    for _ in range(100):
        clock[0] += int(6 * CHEAP)
        cost.note(32, int(CHEAP))
        assert not tuning.note(cost, 32, int(CHEAP))
        tuning.made_here(6, int(6 * CHEAP))
    assert autotuner.own_ns == 0


class Work:
    """Rows of one segment, that a tuning is told of: no time passes.

    Args:
        threads: how many there may be.
    """

    def __init__(self, threads: int) -> None:
        self.autotuner = Autotuner()
        self.cost = self.autotuner.cost(0, 32)
        # No time passes: a machine that does something else is not to look like slow work.
        self.tuning = Tuning(threads, self.autotuner, lambda: 0)
        for _ in range(2):
            self._do(8, COSTLY_ROW_NS, 1.0)
        assert self.tuning.active == threads

    def _do(self, rows: int, row_ns: float, slowed: float) -> None:
        busy = int(rows * row_ns)
        trial, wall = self.tuning.trial, int(busy * slowed)
        self.cost.note(rows, wall)
        self.tuning.note(self.cost, rows, wall, busy, trial, busy)

    def until_judged(self, row_ns: dict[int, float], slowed: dict[int, float]) -> int:
        """Do rows until the next trial is over; return how many.

        Args:
            row_ns: for how long a row keeps a thread busy, by how many threads take part.
            slowed: how many times longer it takes.
        """
        rows = 0
        for is_trial in (False, True):
            while (self.tuning.trial is not None) is is_trial:
                self.do(1, row_ns, slowed)
                rows += 1
        return rows

    def do(self, rows: int, row_ns: dict[int, float], slowed: dict[int, float]) -> None:
        """Do so many rows."""
        for _ in range(rows):
            threads = self.tuning.active
            self._do(1, row_ns[threads], slowed[threads])


COSTLY_ROW_NS = 2 * INLINE_BATCH_NS
ALIKE = {4: 5e6, 1: 5e6}
FREE = {4: 1.1, 1: 1.0}
BUSY = {4: 8.0, 1: 3.0}  # they wait for something else, too
HINDERED = {4: 4.0, 1: 1.0}


@pytest.mark.parametrize(
    "row_ns", [ALIKE, {4: 6.5e6, 1: 5e6}, {4: 5e6, 1: 6.5e6}], ids=["alike", "larger", "smaller"]
)
@pytest.mark.parametrize(
    ("slowed", "threads"), [(FREE, 4), (BUSY, 4), (HINDERED, 1)], ids=["free", "busy", "hindered"]
)
def test_examples_may_be_of_any_size_while_threads_are_tried_out(
    row_ns: dict[int, float], slowed: dict[int, float], threads: int
) -> None:
    work = Work(4)
    work.until_judged(row_ns, slowed)
    assert work.tuning.active == work.autotuner.active == threads


@pytest.mark.parametrize(("most_ns", "threads"), [(6.5e6, 4), (15e6, 1)])
def test_threads_may_need_more_of_the_processor_for_the_same(most_ns: float, threads: int) -> None:
    """They take the GIL from one another; from so much on, one thread alone is faster."""
    work = Work(4)
    work.until_judged({4: most_ns, 1: 5e6}, {4: 2.6, 1: 1.0})
    assert work.tuning.active == threads


@pytest.mark.parametrize(
    ("row_ns", "slowed", "threads"),
    [
        (20_000, {4: 4.0, 1: 1.0}, 0),  # 0.64 ms a batch
        (20_000, {4: 1.5, 1: 1.0}, 4),  # faster side by side all the same
        (20_000, {4: 8.0, 1: 2.0}, 1),  # 1.28 ms, and half of it is waiting
        (40_000, {4: 4.0, 1: 1.0}, 1),
    ],
)
def test_what_was_costly_only_at_first_goes_back_to_the_consumer(
    row_ns: float, slowed: dict[int, float], threads: int
) -> None:
    work = Work(4)
    work.until_judged({4: row_ns, 1: row_ns}, slowed)
    assert work.tuning.active == threads


def test_a_slow_first_piece_brings_in_no_threads() -> None:
    autotuner = Autotuner()
    cost, tuning = autotuner.cost(0, 64), Tuning(4, autotuner, lambda: 0)
    for row_ns in (2 * COSTLY_ROW_NS, 2_000, 2_000, 2_000):
        cost.note(64, 64 * row_ns)
        assert not tuning.note(cost, 64, 64 * row_ns)
    assert tuning.active == 0


def test_what_is_used_often_costs_a_batch_less() -> None:
    autotuner = Autotuner()
    cost, tuning = autotuner.cost(0, 64, 4.0), Tuning(4, autotuner, lambda: 0)
    for _ in range(20):
        cost.note(16, 16 * 50_000)
        assert not tuning.note(cost, 16, 16 * 50_000)
    assert cost.batch_ns() == 16 * 50_000


@given(st.lists(st.booleans(), min_size=3, max_size=8))
def test_one_trial_that_misleads_decides_nothing(hindered: list[bool]) -> None:
    work = Work(4)
    for each in hindered:
        work.until_judged(ALIKE, HINDERED if each else FREE)
    most = sum(hindered[-3:]) > 1
    assert work.tuning.active == work.autotuner.active == (1 if most else 4)
    assert work.autotuner.speedup == (pytest.approx(1.0) if most else None)


def test_threads_are_tried_out_ever_more_rarely() -> None:
    work = Work(4)
    rows = [work.until_judged(ALIKE, FREE) for _ in range(6)]
    assert rows[0] < rows[1]
    assert all(1.5 * one < another for one, another in pairwise(rows[2:]))


def test_threads_that_sleep_all_stay() -> None:
    work = Work(4)
    for _ in range(2):
        work.until_judged(ALIKE, {4: 50.0})  # one alone is not tried
        assert work.tuning.active == 4
        assert work.autotuner.speedup is None


@pytest.mark.parametrize(("alone", "speedup"), [(1.5, 1.5), (4.0, None)])
def test_who_does_not_compute_may_wait_for_storage(alone: float, speedup: float | None) -> None:
    work = Work(4)
    work.until_judged(ALIKE, {4: 4.0, 1: alone})
    assert work.autotuner.speedup == (speedup and pytest.approx(speedup))


def test_threads_that_never_wait_for_each_other_all_stay() -> None:
    work = Work(4)
    for _ in range(2):
        work.until_judged({4: 5e6}, {4: 1.1})  # nor here
        assert work.tuning.active == 4


@pytest.mark.parametrize("slowed", [FREE, HINDERED], ids=["free", "hindered"])
def test_epochs_may_be_shorter_than_a_trial(slowed: dict[int, float]) -> None:
    work, judged = Work(4), 0
    work.until_judged(ALIKE, slowed)
    for _ in range(500):
        is_tried = work.tuning.trial is not None
        work.tuning = Tuning(4, work.autotuner)
        work.do(4, ALIKE, slowed)
        judged += is_tried and work.tuning.trial is None
    assert judged >= 2


def test_trials_go_on_in_the_next_epoch() -> None:
    work = Work(4)
    work.until_judged(ALIKE, HINDERED)
    for _ in range(2):
        work.tuning = Tuning(4, work.autotuner)
        assert work.tuning.active == 1
        work.until_judged(ALIKE, HINDERED)
    work.until_judged(ALIKE, FREE)
    assert Tuning(4, work.autotuner).active == 1
    work.until_judged(ALIKE, FREE)
    assert Tuning(4, work.autotuner).active == 4


class Sleepers:
    """Threads that wait for something else, and a consumer that waits for them; time is counted.

    Args:
        at_once: how many rows the storage serves at the same time.
        most: how many threads there may be; None: the user named a number.
        waited: the fraction of the time for which the consumer waits.
    """

    WAIT_NS = 4_000_000

    def __init__(self, at_once: int, most: int | None, *, waited: float = 1.0) -> None:
        self.autotuner, self.at_once, self.waited = Autotuner(), at_once, waited
        self.most, self.now_ns = most, 0
        self.asked: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        may_grow = None if self.most is None else self.may_grow
        self.tuning = Tuning(2, self.autotuner, lambda: self.now_ns, may_grow)

    def may_grow(self, threads: int, cost: CostEstimate) -> bool:
        self.asked.append(threads)
        assert self.most is not None
        return threads <= self.most

    def run(self, rows: int) -> None:
        cost = self.autotuner.cost(0, 32)
        for _ in range(rows):
            threads = max(1, self.tuning.active)
            trial = self.tuning.trial
            self.now_ns += self.WAIT_NS // min(threads, self.at_once)
            wall = self.WAIT_NS * max(1, threads // self.at_once)
            cost.note(1, wall)
            waited = int(self.waited * self.now_ns)
            self.tuning.note(cost, 1, wall, wall // 50, trial, wall // 50, waited)


@pytest.mark.parametrize(
    ("at_once", "most", "waited", "threads"),
    [
        (1000, 64, 1.0, 64),  # as many as may be
        (1000, 20, 1.0, 16),
        (10, 64, 1.0, 16),  # more than 10 do not help, 16 help more than 8
        (8, 64, 1.0, 8),
        (2, 64, 1.0, 2),  # a disk that is as fast as it gets
        (1000, None, 1.0, 2),  # the user named a number
        (1000, 64, 0.05, 2),  # nobody waits for them
    ],
)
def test_threads_that_sleep_become_more_while_that_helps(
    at_once: int, most: int | None, waited: float, threads: int
) -> None:
    sleepers = Sleepers(at_once, most, waited=waited)
    sleepers.run(3_000)
    assert sleepers.autotuner.active == threads
    sleepers.begin()
    assert sleepers.tuning.active in (threads, 2 * threads)  # or a trial goes on


def test_more_threads_are_tried_again_later() -> None:
    sleepers = Sleepers(2, 64)
    sleepers.run(1_000)
    assert sleepers.autotuner.active == 2
    sleepers.at_once = 1000  # the storage was busy with something else
    sleepers.run(20_000)
    assert sleepers.autotuner.active == 64


def test_threads_become_more_over_epochs_that_are_shorter_than_a_trial() -> None:
    sleepers = Sleepers(1000, 64)
    for _ in range(400):
        sleepers.begin()
        if sleepers.tuning.trial is not None:  # it goes on with the threads that it is of
            assert sleepers.tuning.active == sleepers.tuning.trial.threads
        sleepers.run(20)
    assert sleepers.autotuner.active == 64
