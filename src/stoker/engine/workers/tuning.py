"""Decides how many threads of a run take part, by a timed trial.

1. The consumer works inline while a batch costs less than 1 ms over all segments. Threads are tried
   if it costs more, or if the consumer does something else between two batches for longer than a
   batch costs, so that threads can hide it. Work that is done without the GIL gets all threads at
   once.
2. A trial times all threads: at least 12 pieces of work, and 20 ms of each thread. If they were
   neither asleep nor kept more processors busy than one thread can, one alone is timed, too.
3. All stay if they kept more processors busy, by a tenth, as examples differ in size; but not if
   rows came a tenth slower: threads that pass the GIL around keep more processors busy, too (two
   that decoded JPEGs of 64 x 64 by Pillow made 0.4 to 0.7 of one's rows). If threads mostly sleep
   although the consumer waits, twice as many are timed, and stay if rows come a tenth faster; and
   so on, as far as memory and the user allow.
4. The work goes back to the consumer if batches came no faster than they would inline.
5. The decision is kept for a hundred times as long as the trial took, from epoch to epoch.

The stream does not depend on the number. ``Autotuner`` forgets it after an epoch in which examples
were missing from a cache: cached examples cost less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from stoker.basics.resources import thread_delay_ns
from stoker.engine.workers.cost import FIRST_NOTES, INLINE_BATCH_NS, CostEstimate
from stoker.stats import ProcessTrial

# Threads of one run that sleep: 64 wait for 1,000 reads of 60 ms in a second. Chosen, not measured.
MOST_SLEEPING = 64
# Fewest pieces of each number of threads: a few are not slow or fast by chance. Chosen, not
# measured.
_PIECES = 12
# The work of each thread: twenty chunks, about four time slices of Python's GIL (5 ms).
_TIMED_NS = 20_000_000
# Of the time of one number of threads, from a trial to the next: one thread alone may cost half the
# speed or more, so a trial takes less than 1 % of the time.
_RESTS = 100
# As a share of the time: a tenth less counts as faster. Smaller differences are noise between
# trials (bench/step.py, ranges).
_CLEARLY = 0.9
# Processors that threads keep busy: with fewer they sleep, and with more one thread alone could not
# do nearly as much.
_ASLEEP, _MORE_THAN_ONE = 0.5, 1.7
# As a share of its time: a thread that computes less waits for storage.
_COMPUTES = 0.5
# As a share of the time between two batches: a consumer that waits less gains nothing from more
# threads.
_WAITS = 0.1
# As a multiple of the threads' work: the most by which they slow the consumer down by taking the
# GIL. Chosen, not measured.
_THEIRS = 2.5
# The inline work until threads are considered: after less, the first rows weigh too much (imports,
# cold caches).
_INLINE_TRIAL_NS = 5_000_000
# The inline work from one decision to the next: one chunk, so that deciding costs little.
_LOOK_NS = 1_000_000
# As a share of the time between two batches: less is within the noise of a trial. bench/step.py
# gains 9 % at 6 %.
_WORTH_HIDING = 0.03
# Of a batch: less is about the engine's own cost for one, 30 us (bench/echo_overhead.py).
_HIDDEN_NS = 40_000


@dataclass(slots=True)
class _Spent:
    """The time of rows of one segment, and the part in which threads had or wanted a processor."""

    rows: int = 0
    wall: int = 0
    busy: int = 0


class Timed:
    """Work measured while a given number of threads took part.

    Args:
        threads: the number of threads.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pieces = 0
        self._each: dict[CostEstimate, _Spent] = {}
        self._wall_ns = self._busy_ns = 0
        # Between pieces of work of the same epoch: the time, the consumer's waits in it, and the
        # work that was done.
        self._latest: tuple[int, int] | None = None
        self._period_ns = self._waited_ns = self._work_ns = 0

    def resume(self) -> None:
        """Continue in another epoch."""
        self._latest = None

    def note(
        self, cost: CostEstimate, rows: int, wall: int, busy: int, now_ns: int, waited_ns: int
    ) -> None:
        """Add a measurement, and the consumer's waits in this epoch so far."""
        if self._latest is not None:
            self._period_ns += now_ns - self._latest[0]
            self._waited_ns += waited_ns - self._latest[1]
            self._work_ns += wall
        self._latest = now_ns, waited_ns
        self._pieces += 1
        self._wall_ns += wall
        self._busy_ns += busy
        spent = self._each.setdefault(cost, _Spent())
        spent.rows += rows
        spent.wall += wall
        spent.busy += busy

    @property
    def is_over(self) -> bool:
        """Whether enough was measured."""
        least = max(_PIECES, self.threads)
        return self._pieces >= least and self._wall_ns >= self.threads * _TIMED_NS

    @property
    def each_ns(self) -> float:
        """The time of each thread."""
        return self._wall_ns / self.threads

    @property
    def computes(self) -> bool:
        """Whether the threads computed, or waited for a processor, for most of their time."""
        return self._busy_ns > _COMPUTES * self._wall_ns

    @property
    def is_clear(self) -> bool:
        """Whether one thread alone would surely be slower."""
        return self.threads == 1 or not _ASLEEP <= self.processors <= _MORE_THAN_ONE

    @property
    def processors(self) -> float:
        """How many processors the threads had or wanted on average."""
        return self._busy_ns / max(1.0, self.each_ns)

    @property
    def rows_per_ns(self) -> float:
        """How many rows they made in a nanosecond of their time."""
        return sum(spent.rows for spent in self._each.values()) / max(1.0, self.each_ns)

    @property
    def wants_more(self) -> bool:
        """Whether the threads mostly slept although the consumer was waiting for them."""
        return not self.computes and self._waited_ns > _WAITS * self._period_ns

    @property
    def work_ns(self) -> float:
        """The work of a batch."""
        each = self._each.items()
        return sum(spent.wall / spent.rows * cost.rows_per_batch for cost, spent in each)

    def inline_ns(self) -> float:
        """Return the cost of a batch for the consumer, 0 if it never made one.

        The first rows may have cost more (files were opened, caches were empty), so it counts at
        most as the work of a thread alone.
        """
        made_ns = sum((cost.inline_row_ns or 0.0) * cost.rows_per_batch for cost in self._each)
        return min(made_ns, self.work_ns) if self.threads == 1 else made_ns

    def is_behind(self, own_ns: float) -> bool:
        """Whether batches came later than if the consumer made them itself.

        ``own_ns`` is its time for other things between two batches, when it did.
        """
        inline_ns, work_ns = self.inline_ns(), self.work_ns
        if not 0 < inline_ns < INLINE_BATCH_NS:
            return False
        batches = max(1, self._work_ns) / max(1.0, work_ns)
        own_ns = min(own_ns, (self._period_ns - self._waited_ns) / batches)
        takes_ns = max(work_ns / self.threads, self._period_ns / batches)
        # Threads that take the GIL from the consumer make it slower, but not without limit.
        # A longer time means that the consumer's own work has grown.
        is_theirs = takes_ns <= own_ns + _THEIRS * max(work_ns / self.threads, inline_ns)
        return is_theirs and takes_ns > own_ns + _CLEARLY * inline_ns

    def tell_asleep(self) -> None:
        """Tell the costs how long a single thread slept for a row."""
        for cost, spent in self._each.items():
            cost.asleep_row_ns = max(0, spent.wall - spent.busy) / spent.rows


class Autotuner:
    """The measured speeds of a pipeline, and how many threads take part; outlives its epochs.

    While an epoch runs, all of it runs under the pool's lock.

    Args:
        clock_ns: the clock, in nanoseconds.
        delay_ns: the time that the calling thread has waited for a processor so far.

    Attributes:
        active: how many threads take part now; 0: the consumer does the work.
        is_settled: whether ``active`` stays, because there is nothing to try.
        timed: the work that is being timed; it goes on in the next epoch.
        speedup: by the last trial, the speed of all threads as a multiple of that of one; None if
            only one number was timed, or if even a single thread mostly slept.
        own_ns: the time that the inline consumer needs for other things between two batches.
        factor: the echoing factor that ranks agreed on last (see ``rank_sync``), or None.
        process_trial: what the first process showed of the user's code; None without one.
        processes: how many processes run the user's code; 0: it stays inline; None while undecided.
        most_processes: how many there are if the loop leaves them all cores; 0 if there is nothing
            to decide: the user named a number, the code waits, or one fewer was too few.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        delay_ns: Callable[[], int] = thread_delay_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._delay_ns = delay_ns
        self.factor: int | None = None
        self.processes: int | None = None
        self.most_processes = 0
        self.process_trial: ProcessTrial | None = None
        self.costs: dict[int, CostEstimate] = {}
        self._misses = 0
        self._may_grow: Callable[[int, CostEstimate], bool] | None = None
        self._forget()

    def _forget(self) -> None:
        self.active = 0
        self.is_settled = False
        self.timed: Timed | None = None
        self.speedup: float | None = None
        self.own_ns = 0.0
        self._before: Timed | None = None  # of the same trial
        self._rest_ns = 0.0  # the work until the next trial
        self._limit = 0

    def begin_epoch(self, misses: int) -> None:
        """Forget the measurements if a cache missed examples in the epoch before."""
        if misses != self._misses:
            self._misses = misses
            self._forget()
            self.costs.clear()

    def cost(self, segment: int, rows_per_batch: int, uses: float = 1.0) -> CostEstimate:
        """Return the cost of a segment, which is kept between epochs."""
        return self.costs.setdefault(segment, CostEstimate(rows_per_batch, uses))

    def begin(
        self, limit: int, may_grow: Callable[[int, CostEstimate], bool] | None = None
    ) -> None:
        """Begin a run.

        Args:
            limit: the number of threads.
            may_grow: returns whether the pool may have so many threads for work of this cost; None
                if ``limit`` is fixed.
        """
        self._may_grow = may_grow
        self._limit = limit if may_grow is None else max(limit, self._limit)
        self._delayed_ns = 0
        self._look_again()
        if self.timed is not None:
            self.timed.resume()

    def _look_again(self) -> None:
        self._unlooked_ns = _LOOK_NS
        self._looked_ns: int | None = None
        self._outputs = self._making_ns = 0  # since the last look

    def spare_core(self, elapsed_ns: int, waited_ns: int, worked_ns: int) -> None:
        """Leave the loop a core in the next epoch, unless it would wait for one process fewer.

        With two processes on two cores, one fewer was faster by 4 to 15 % where the loop computed.

        Args:
            elapsed_ns: how long this epoch took.
            waited_ns: how long the consumer waited for workers in it.
            worked_ns: the work of all worker processes in it.
        """
        if self.most_processes < 2 or not worked_ns:
            return
        waits = waited_ns > _WAITS * elapsed_ns
        if waits and self.processes != self.most_processes:  # one fewer was too few
            self.processes, self.most_processes = self.most_processes, 0
            return
        keeps_up = not waits and worked_ns <= (self.most_processes - 1) * elapsed_ns
        self.processes = self.most_processes - keeps_up

    def settle(self, threads: int) -> None:
        """Set for good how many threads take part."""
        self.active, self.is_settled = threads, True

    def note(
        self,
        cost: CostEstimate,
        rows: int,
        wall: int,
        busy: int = 0,
        timed: Timed | None = None,
        waited: int = 0,
    ) -> bool:
        """Add a measurement; return whether ``active`` may have changed.

        Args:
            cost: the cost of the segment whose rows were computed.
            rows: the number of rows.
            wall: their time, in nanoseconds.
            busy: in a trial, the time in which the thread had a processor or waited for one.
            timed: the measurement under way when the rows were begun.
            waited: the time that the consumer has waited so far.
        """
        if self.active == 0:
            return self._leaves_inline(cost, wall)
        if self.timed is None:
            self._rest_ns -= wall
            return self._rest_ns <= 0 and self._time(self._limit)
        if timed is not self.timed:
            return False
        timed.note(cost, rows, wall, busy, self._clock_ns(), waited)
        return timed.is_over and self._judge(timed, cost)

    def _time(self, threads: int) -> bool:
        self.timed = Timed(threads)
        self.active = threads
        return True

    def _judge(self, timed: Timed, cost: CostEstimate) -> bool:
        """Time another number of threads, or end the trial."""
        best, before = timed, self._before
        if before is None:
            self.speedup = None
            if not timed.is_clear:
                self._before = timed
                return self._time(1)
        elif timed.threads == 1:
            timed.tell_asleep()
            speedup = before.processors / max(1e-9, timed.processors)
            self.speedup = speedup if timed.computes else None
            is_slower = before.rows_per_ns < _CLEARLY * timed.rows_per_ns
            best = before if _CLEARLY * speedup > 1 and not is_slower else timed
        elif _CLEARLY * timed.rows_per_ns < before.rows_per_ns:
            best = before
        more, is_largest = 2 * best.threads, best.threads >= max(self._limit, timed.threads)
        self._limit = max(self._limit, best.threads)
        if is_largest and best.wants_more and self._may_grow and self._may_grow(more, cost):
            self._before = best
            return self._time(more)
        self._rest_ns = _RESTS * best.threads * timed.each_ns
        self.timed = self._before = None
        self.active = best.threads
        if best.is_behind(self.own_ns):  # until a batch turns out to be costly after all
            self.active = 0
            self._look_again()
        return True

    def made_here(self, outputs: int, wall: int) -> None:
        """Record how long the consumer took to make outputs, the engine's own work included."""
        self._outputs += outputs
        self._making_ns += wall

    def _leaves_inline(self, cost: CostEstimate, wall: int) -> bool:
        self._rest_ns -= wall
        self._unlooked_ns += wall
        if self._unlooked_ns < _LOOK_NS:
            return False
        outputs, making_ns, before_ns = self._outputs, self._making_ns, self._looked_ns
        self._outputs = self._making_ns = self._unlooked_ns = 0
        self._looked_ns = self._clock_ns()
        costs = self.costs.values()
        slow = cost.row_ns is not None and cost.row_ns > INLINE_BATCH_NS
        known = slow or sum(each.work_ns for each in costs) > _INLINE_TRIAL_NS
        # The first row of all imports modules, and so may the first batch.
        known = known and all(each.notes >= FIRST_NOTES or not each.rows for each in costs)
        for each in costs:
            each.inline_row_ns = each.row_ns
        batch_ns = sum(each.batch_ns() for each in costs)
        if before_ns is not None and outputs:
            own_ns = (elapsed_ns := self._looked_ns - before_ns) - making_ns
            # Less never matters, and asking takes 7 us.
            if own_ns > batch_ns * outputs or batch_ns > INLINE_BATCH_NS:
                held_up_ns = self._held_up_ns()
                own_ns -= held_up_ns
                batch_ns *= max(0.0, 1 - held_up_ns / elapsed_ns)
            # A fifth of each, as of the cost of a row; a single long pause changes little.
            each_ns = min(max(0, own_ns) / outputs, 2 * self.own_ns + batch_ns)
            self.own_ns += 0.2 * (each_ns - self.own_ns)
        if not known or (batch_ns <= INLINE_BATCH_NS and not self._can_hide(batch_ns)):
            return False
        self.active = self._limit
        self._rest_ns = 0
        if all(each.is_parallel for each in costs):  # then there is nothing to try
            self.settle(self.active)
        return True

    def _held_up_ns(self) -> int:
        """Return how long the consumer has waited for a processor since this was asked last.

        Other programs had it: threads of this one would have had to wait, too.
        """
        before, self._delayed_ns = self._delayed_ns, self._delay_ns()
        return self._delayed_ns - before

    def _can_hide(self, batch_ns: float) -> bool:
        """Whether threads could make batches while the consumer does something else."""
        own_ns = self.own_ns
        is_worth = batch_ns > max(_HIDDEN_NS, _WORTH_HIDING * (own_ns + batch_ns))
        return is_worth and own_ns > batch_ns and self._rest_ns <= 0
