"""How many threads take part, by what was measured; no thread runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.workers.cost import IMAGE_ROW_NS, INLINE_BATCH_NS, CostEstimate
from stoker.engine.workers.tuning import Autotuner

CHEAP = INLINE_BATCH_NS / 2
COSTLY = 4 * INLINE_BATCH_NS


def test_what_was_learnt_while_a_cache_was_filled_is_forgotten() -> None:
    autotuner = Autotuner()
    autotuner.begin_epoch(0)
    filled = autotuner.cost(0, 32)
    filled.note(32, int(COSTLY))
    autotuner.settle(4)
    autotuner.factor = 2
    autotuner.begin_epoch(100)  # all examples were missing in the epoch before
    assert (autotuner.active, autotuner.is_settled) == (0, False)
    assert autotuner.cost(0, 32).row_ns is None
    autotuner.settle(1)
    autotuner.begin_epoch(100)  # none was
    assert (autotuner.active, autotuner.factor) == (1, 2)


@pytest.mark.parametrize(("row_ns", "at_once"), [(2 * IMAGE_ROW_NS, True), (30_000, False)])
def test_what_needs_no_gil_takes_all_threads_without_a_trial(row_ns: int, at_once: bool) -> None:
    autotuner = Autotuner()
    cost = autotuner.cost(0, 64)
    cost.releases_gil, cost.gil_row_ns = True, IMAGE_ROW_NS
    autotuner.begin(4)
    for _ in range(2):  # what the first piece costs decides nothing
        cost.note(100, 100 * row_ns)
    assert autotuner.note(cost, 200, 200 * row_ns, 0)
    assert autotuner.active == 4
    assert autotuner.is_settled is at_once


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
    clock, delay = [0], [0]
    tuning = Autotuner(lambda: clock[0], lambda: delay[0])
    cost = tuning.cost(0, 32)
    tuning.begin(4)
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
    clock, delay = [0], [0]
    tuning = Autotuner(lambda: clock[0], lambda: delay[0])
    cost = tuning.cost(0, 32)
    tuning.begin(4)
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
    clock = [0]
    tuning = Autotuner(lambda: clock[0])
    cost = tuning.cost(0, 32)
    tuning.begin(4)
    for _ in range(100):
        clock[0] += int(6 * CHEAP)
        cost.note(32, int(CHEAP))
        assert not tuning.note(cost, 32, int(CHEAP))
        tuning.made_here(6, int(6 * CHEAP))
    assert tuning.own_ns == 0


class Work:
    """Rows of one segment, that a tuner is told of.

    Args:
        threads: how many there may be.
        clock_ns: the time; by default none passes: a machine that does something else is not to
            look like slow work.
    """

    def __init__(self, threads: int, clock_ns: Callable[[], int] = lambda: 0) -> None:
        self.tuner = Autotuner(clock_ns)
        self.cost = self.tuner.cost(0, 32)
        self.tuner.begin(threads)
        for _ in range(2):
            self._do(8, COSTLY_ROW_NS, 1.0)
        assert self.tuner.active == threads

    def _do(self, rows: int, row_ns: float, slowed: float) -> None:
        busy = int(rows * row_ns)
        timed, wall = self.tuner.timed, int(busy * slowed)
        self.cost.note(rows, wall)
        self.tuner.note(self.cost, rows, wall, busy, timed)

    def until_judged(self, row_ns: dict[int, float], slowed: dict[int, float]) -> int:
        """Do rows until the next trial is over; return how many.

        Args:
            row_ns: for how long a row keeps a thread busy, by how many threads take part.
            slowed: how many times longer it takes.
        """
        rows = 0
        for is_trial in (False, True):
            while (self.tuner.timed is not None) is is_trial:
                self.do(1, row_ns, slowed)
                rows += 1
        return rows

    def do(self, rows: int, row_ns: dict[int, float], slowed: dict[int, float]) -> None:
        """Do so many rows."""
        for _ in range(rows):
            threads = self.tuner.active
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
    assert work.tuner.active == threads


@pytest.mark.parametrize(("thrashing", "threads"), [(1.0, 4), (1.8, 1)])
def test_threads_that_only_pass_the_gil_around_do_not_stay(thrashing: float, threads: int) -> None:
    """They keep more processors busy than one, and make fewer rows."""
    work = Work(4)
    work.until_judged({4: thrashing * 5e6, 1: 5e6}, {4: 3.2, 1: 1.0})
    assert work.tuner.active == threads


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
    assert work.tuner.active == threads


def test_a_slow_first_piece_brings_in_no_threads() -> None:
    tuning = Autotuner(lambda: 0)
    cost = tuning.cost(0, 64)
    tuning.begin(4)
    for row_ns in (2 * COSTLY_ROW_NS, 2_000, 2_000, 2_000):
        cost.note(64, 64 * row_ns)
        assert not tuning.note(cost, 64, 64 * row_ns)
    assert tuning.active == 0


def test_what_is_used_often_costs_a_batch_less() -> None:
    tuning = Autotuner(lambda: 0)
    cost = tuning.cost(0, 64, 4.0)
    tuning.begin(4)
    for _ in range(20):
        cost.note(16, 16 * 50_000)
        assert not tuning.note(cost, 16, 16 * 50_000)
    assert cost.batch_ns() == 16 * 50_000


@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_the_last_trial_counts(hindered: list[bool]) -> None:
    work = Work(4)
    for each in hindered:
        work.until_judged(ALIKE, HINDERED if each else FREE)
        assert work.tuner.active == (1 if each else 4)
        assert work.tuner.speedup == (pytest.approx(1.0) if each else None)


@pytest.mark.parametrize("slowed", [FREE, HINDERED], ids=["free", "hindered"])
@pytest.mark.parametrize("row_ns", [1e5, 5e6, 1e9])
def test_trials_take_little_of_the_time(row_ns: float, slowed: dict[int, float]) -> None:
    """However long one example takes."""
    work, each = Work(4), {4: row_ns, 1: row_ns}
    work.until_judged(each, slowed)
    counts = {True: 0, False: 0}
    while work.tuner.timed is None or not counts[False]:
        counts[False] += 1
        work.do(1, each, slowed)
    while work.tuner.timed is not None:
        counts[True] += 1
        work.do(1, each, slowed)
    assert 30 * counts[True] < counts[False]


@pytest.mark.parametrize("slowed", [50.0, 1.1], ids=["they sleep", "none waits for another"])
def test_threads_that_would_not_be_faster_alone_all_stay(slowed: float) -> None:
    work = Work(4)
    for _ in range(2):
        work.until_judged({4: 5e6}, {4: slowed})  # one alone is not tried
        assert work.tuner.active == 4
        assert work.tuner.speedup is None


@pytest.mark.parametrize(("alone", "speedup"), [(1.5, 1.5), (4.0, None)])
def test_who_does_not_compute_may_wait_for_storage(alone: float, speedup: float | None) -> None:
    work = Work(4)
    work.until_judged(ALIKE, {4: 4.0, 1: alone})
    assert work.tuner.speedup == (speedup and pytest.approx(speedup))


@pytest.mark.parametrize("slowed", [FREE, HINDERED], ids=["free", "hindered"])
def test_epochs_may_be_shorter_than_a_trial(slowed: dict[int, float]) -> None:
    work, judged = Work(4), 0
    work.until_judged(ALIKE, slowed)
    for _ in range(2000):
        is_tried = work.tuner.timed is not None
        work.tuner.begin(4)
        work.do(4, ALIKE, slowed)
        judged += is_tried and work.tuner.timed is None
    assert judged >= 2


def test_trials_go_on_in_the_next_epoch() -> None:
    work = Work(4)
    work.until_judged(ALIKE, HINDERED)
    for slowed, threads in [(HINDERED, 1), (HINDERED, 1), (FREE, 4)]:
        work.tuner.begin(4)
        work.until_judged(ALIKE, slowed)
        work.tuner.begin(4)
        assert work.tuner.active == threads


class Sleepers:
    """Threads that wait for something else, and a consumer that waits for them; time is counted.

    Args:
        at_once: how many rows the storage serves at the same time.
        most: how many threads there may be; None: the user named a number.
        waited: the fraction of the time for which the consumer waits.
    """

    WAIT_NS = 4_000_000

    def __init__(self, at_once: int, most: int | None, *, waited: float = 1.0) -> None:
        self.most, self.now_ns = most, 0
        self.at_once, self.waited = at_once, waited
        self.tuner = Autotuner(lambda: self.now_ns)
        self.asked: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        may_grow = None if self.most is None else self.may_grow
        self.tuner.begin(2, may_grow)

    def may_grow(self, threads: int, cost: CostEstimate) -> bool:
        self.asked.append(threads)
        assert self.most is not None
        return threads <= self.most

    def run(self, rows: int) -> None:
        cost = self.tuner.cost(0, 32)
        for _ in range(rows):
            threads = max(1, self.tuner.active)
            timed = self.tuner.timed
            self.now_ns += self.WAIT_NS // min(threads, self.at_once)
            wall = self.WAIT_NS * max(1, threads // self.at_once)
            cost.note(1, wall)
            waited = int(self.waited * self.now_ns)
            self.tuner.note(cost, 1, wall, wall // 50, timed, waited)


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
    assert sleepers.tuner.active == threads
    sleepers.begin()
    assert sleepers.tuner.active in (threads, 2 * threads)  # or a trial goes on


def test_more_threads_are_tried_again_later() -> None:
    sleepers = Sleepers(2, 64)
    sleepers.run(1_000)
    assert sleepers.tuner.active == 2
    sleepers.at_once = 1000  # the storage was busy with something else
    sleepers.run(20_000)
    assert sleepers.tuner.active == 64


def test_threads_become_more_over_epochs_that_are_shorter_than_a_trial() -> None:
    sleepers = Sleepers(1000, 64)
    for _ in range(400):
        sleepers.begin()
        if sleepers.tuner.timed is not None:  # it goes on with the threads that it is of
            assert sleepers.tuner.active == sleepers.tuner.timed.threads
        sleepers.run(20)
    assert sleepers.tuner.active == 64
