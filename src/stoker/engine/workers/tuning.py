"""Decides how many threads of a run take part: none, one, all, or more than asked for.

The decision follows from the measured cost of work, and from timed trials.

Examples differ, and other programs run. So trials are not compared by the time of a row, but by the
part of it in which threads waited for each other: the time beyond what a thread had, or wanted, a
processor. Threads that keep taking the GIL from one another also need far more processor time for
the same rows; if the difference is larger than examples differ, it counts, too.

The number is never between one and all, and the stream does not depend on it. The decision:

1. The consumer works inline until a row takes more than 1 ms, or it has worked for 5 ms in all. If
   a batch then costs more than 1 ms over all segments, all threads start. They also start for a
   cheaper batch if the consumer does something else between batches for longer than the batch
   costs (a training step; waiting for a processor does not count), so that threads can hide it.
   Otherwise the consumer stays inline, and looks again later. Two kinds of work release the GIL and
   get all threads without a trial: gathering of rows, and image functions where an image takes
   0.2 ms or more.
2. A trial with all threads: at least 12 pieces of work, and 20 ms of each thread. All threads stay
   if together they kept less than half a core busy: they were sleeping (reads, latency). They also
   stay if they waited so little for each other that one thread could never do nearly as much.
3. Otherwise a trial with one thread. All take part if a row was at least a tenth faster with all,
   else one does. The work goes back to the consumer if a batch cost less than 1 ms inline, or costs
   less in one thread, and the better of the two is not clearly faster than inline; but not where
   batches came faster, during the trial, than the consumer would get to them.
4. Threads that sleep cost no core. If all take part, sleep half of their time or more, and the
   consumer waits for them, twice as many are tried, and stay if batches then come a tenth faster;
   and so on, within the limits of memory and of copying the user's objects (``WorkerPool``). Later
   trials try it again. If the user named a number of threads, it is kept.
5. A trial may mislead: another program used the processor, or a pool was still filling. So trials
   are repeated, longer and ever more rarely, and the majority of the last three counts.

``Autotuner`` keeps the decision, and the cost of each segment, from epoch to epoch. It forgets them
after an epoch in which examples were missing from a cache: cached examples cost less.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from stoker.basics.resources import thread_delay_ns
from stoker.engine.workers.cost import FIRST_NOTES, INLINE_BATCH_NS, CostEstimate
from stoker.stats import ProcessTrial

# Fewest pieces of a trial: a few are not slow or fast by chance. Chosen, not measured.
_TRIAL_TASKS = 12
# As a share of the time: a tenth less counts as faster. Smaller differences are noise between
# trials (bench/step.py, ranges).
_CLEARLY = 0.9
# As a multiple of the threads' work: the most by which they slow the consumer down by taking the
# GIL. Chosen, not measured.
_THEIRS = 2.5
# As a share of a row's processor time: the examples of two trials differ by less in the mean.
# Chosen, not measured.
_BURNS = 1.4
# As a share of a single thread's time: if it computes less, several threads may wait for storage.
_COMPUTES = 0.5
# As a share of their time in which threads compute or wait for a processor: if it is less, more
# threads may help.
_SLEEPS = 0.5
# As a share of the time between two batches: a consumer that waits less gains nothing from more
# threads.
_WAITS = 0.1
# The speed-up of batches that twice the threads must bring. Trials differ by less (bench/step.py,
# ranges).
_FASTER = 1.1
# Pieces of each thread: the first of all threads may end together, in no time. Chosen, not
# measured.
_ROUNDS = 3
# As a share of the time that one thread would take at best: below it, one thread is not tried. Well
# under _CLEARLY, because one trial may mislead.
_CERTAINLY = 0.6


def choose_threads(
    limit: int,
    work_ns: Mapping[int, float],
    inline_ns: float,
    own_ns: float = 0.0,
    period_ns: float = 0.0,
) -> int:
    """Return how many threads are to take part; 0: none, the consumer does the work.

    Args:
        limit: the number of threads.
        work_ns: the work of a batch, summed over its threads, by the number of threads: for all of
            them, and for a single one if that was tried.
        inline_ns: the work of a batch for the consumer alone; 0 if unknown.
        own_ns: the time that the consumer needs for other things between two batches.
        period_ns: the time from one batch to the next in the last of these trials.
    """
    many = max(work_ns)
    best, batch_ns = limit, work_ns[many] / many
    if many > 1 and 1 in work_ns:
        best = many
        if batch_ns > _CLEARLY * work_ns[1]:
            best, batch_ns = 1, work_ns[1]
    if not 0 < inline_ns < INLINE_BATCH_NS:
        return best
    # Threads that take the GIL from the consumer make it slower, but not without limit.
    # A longer time means that the consumer's own work has grown.
    takes_ns = max(batch_ns, period_ns if best == min(work_ns) else 0.0)
    is_theirs = takes_ns <= own_ns + _THEIRS * max(batch_ns, inline_ns)
    return 0 if is_theirs and takes_ns > own_ns + _CLEARLY * inline_ns else best


class _Spent:
    """The time of rows of one segment, and the part in which threads had or wanted a processor."""

    def __init__(self) -> None:
        self.rows = self.wall = self.busy = self.cpu = 0

    def add(self, rows: int, wall: int, busy: int, cpu: int) -> None:
        self.rows += rows
        self.wall += wall
        self.busy += busy
        self.cpu += cpu

    def slowed(self, other: _Spent) -> float:
        """Return the time that rows lost to other threads, compared with the other trial."""
        waited = self.wall / max(1, self.busy)
        burnt = self.cpu * other.rows / max(1, other.cpu * self.rows)
        return waited * burnt if burnt > _BURNS else waited


class Trial:
    """Work measured while a given number of threads took part.

    Args:
        threads: the number of threads.
        least_ns: the least work of each thread.
        before: the trial with all threads, if this is the one with a single thread.
        fewer: the trial with half as many threads, which slept, if this one tries more.

    Attributes:
        speedup: after the verdict, the speed of all threads as a multiple of the single one's; None
            if only one number was tried, or if even the single thread mostly slept.
    """

    def __init__(
        self, threads: int, least_ns: int, before: Trial | None = None, fewer: Trial | None = None
    ) -> None:
        self.threads = threads
        self.fewer = fewer
        self._least_ns = threads * least_ns
        self._before = before
        self.speedup: float | None = None
        self._pieces = 0
        self._all = _Spent()
        self._each: dict[CostEstimate, _Spent] = {}
        # Between pieces of work of the same epoch: the time, the consumer's waits in it, and the
        # work that was done.
        self._latest: tuple[int, int] | None = None
        self._period_ns = self._waited_ns = self._work_ns = 0

    def resume(self) -> None:
        """Continue the trial in another epoch."""
        self._latest = None

    def note(
        self,
        cost: CostEstimate,
        rows: int,
        wall: int,
        busy: int,
        cpu: int,
        now_ns: int,
        waited_ns: int,
    ) -> None:
        """Add a measurement, and the consumer's waits in this epoch so far."""
        if self._latest is not None:
            self._period_ns += now_ns - self._latest[0]
            self._waited_ns += waited_ns - self._latest[1]
            self._work_ns += wall
        self._latest = now_ns, waited_ns
        self._pieces += 1
        self._all.add(rows, wall, busy, cpu)
        self._each.setdefault(cost, _Spent()).add(rows, wall, busy, cpu)

    @property
    def over(self) -> bool:
        """Whether the trial was long enough."""
        least = _TRIAL_TASKS if self.fewer is None else max(_TRIAL_TASKS, _ROUNDS * self.threads)
        return self._pieces >= least and self._all.wall >= self._least_ns

    @property
    def with_all(self) -> Trial:
        """The trial with all threads: this one, or the one before."""
        return self._before or self

    @property
    def sleeps(self) -> bool:
        """Whether the threads mostly slept although the consumer was waiting for them."""
        is_waited_for = self._waited_ns > _WAITS * self._period_ns
        return is_waited_for and self._all.busy < _SLEEPS * self._all.wall

    @property
    def rows_per_ns(self) -> float:
        """Rows per nanosecond, from the first piece of work to the last."""
        return self._all.rows / max(1, self._period_ns)

    @property
    def is_clear(self) -> bool:
        """Whether all threads take part without a trial of one thread."""
        # Together they kept less than half a core busy: they slept, and did not wait for each
        # other.
        if self.threads == 1 or self._all.busy < 0.5 / self.threads * self._all.wall:
            return True  # more threads always help if they mostly sleep
        each = self._each.items()
        work_ns = sum(spent.wall / spent.rows * cost.rows_per_batch for cost, spent in each)
        least_ns = sum(spent.busy / spent.rows * cost.rows_per_batch for cost, spent in each)
        return work_ns / self.threads <= _CERTAINLY * least_ns

    def verdict(self, limit: int, own_ns: float) -> int:
        """Return how many threads are to take part; for ``own_ns`` see ``Autotuner``.

        ``own_ns`` counts at most as the time in this trial in which the consumer did not wait.
        """
        before = self._before
        shared = before._each.keys() & self._each.keys() if before is not None else set()
        if before is not None and shared:
            work_ns = {before.threads: 0.0, self.threads: 0.0}
            for cost in shared:
                many, one = before._each[cost], self._each[cost]
                cost.asleep_row_ns = max(0, one.wall - one.busy) / one.rows
                row_ns = (many.busy + one.busy) / (many.rows + one.rows) * cost.rows_per_batch
                work_ns[before.threads] += row_ns * many.slowed(one)
                work_ns[self.threads] += row_ns * one.slowed(many)
            if self._all.busy > _COMPUTES * self._all.wall:
                many_ns = max(1.0, work_ns[before.threads] / before.threads)
                self.speedup = work_ns[self.threads] / many_ns
        else:
            each = self._each.items()
            work_ns = {self.threads: sum(s.wall / s.rows * c.rows_per_batch for c, s in each)}
        inline_ns = sum(self._inline_row_ns(c) * c.rows_per_batch for c in self._each)
        batch_ns = sum(s.wall / s.rows * c.rows_per_batch for c, s in self._each.items())
        batches = max(1, self._work_ns) / batch_ns
        period_ns = self._period_ns / batches
        own_ns = min(own_ns, (self._period_ns - self._waited_ns) / batches)
        return choose_threads(limit, work_ns, inline_ns, own_ns, period_ns)

    def _inline_row_ns(self, cost: CostEstimate) -> float:
        """Return the cost of a row for the consumer, 0 if it never made one.

        The first rows may have cost more (files were opened, caches were empty), so it counts at
        most as the cost of a row in a thread alone.
        """
        spent, made = self._each[cost], cost.inline_row_ns or 0.0
        return min(made, spent.wall / spent.rows) if self.threads == 1 else made


# The inline work until threads are considered: after less, the first rows weigh too much (imports,
# cold caches).
_INLINE_TRIAL_NS = 5_000_000
# The inline work from one decision to the next: one chunk, so that deciding costs little.
_LOOK_NS = 1_000_000
# The work of each thread: twenty chunks, about four time slices of Python's GIL (5 ms).
_TRIAL_NS = 20_000_000
# Later trials may take longer, since rests between them are long: at most a fifth of the first
# rest.
_LATER_TRIAL_NS = 100_000_000
# The work of each thread from the first trial to the next; then doubled. At least 25 times a first
# trial.
_REST_NS = 500_000_000
# Half a minute of work: the longest time until a changed load of the machine is noticed. Chosen,
# not measured.
_LONGEST_REST_NS = 64 * _REST_NS
# The fewest trials with which a single misleading one is outvoted.
_VOTES = 3
# As a share of the time between two batches: less is within the noise of a trial. bench/step.py
# gains 9 % at 6 %.
_WORTH_HIDING = 0.03
# Of a batch: less is about the engine's own cost for one, 30 us (bench/echo_overhead.py).
_HIDDEN_NS = 40_000


# As a share of its time: in which the loop has or wants a processor, and in which it waits for
# batches. With two processes on two cores, one fewer was faster by 4 to 15 % where the loop's
# thread computed, and waited 3 to 5 %.
_BUSY = 0.5
_WAITING = 0.1


class LoopTime(NamedTuple):
    """How the consumer's thread spent an epoch.

    Attributes:
        busy_ns: the time in which it had a processor or wanted one; ``cpu_ns``: had one.
        waited_ns: the time in which it waited for workers.
    """

    elapsed_ns: int
    busy_ns: int
    cpu_ns: int
    waited_ns: int

    @property
    def waits(self) -> bool:
        """Whether workers hold the consumer up."""
        return self.waited_ns > _WAITING * self.elapsed_ns


class Autotuner:
    """The measured speeds of a pipeline, and the decision on its threads; outlives its epochs.

    Attributes:
        active: how many threads take part; None while undecided.
        is_settled: whether ``active`` stays, because there is nothing to try.
        trial: the trial that is running; it goes on in the next epoch.
        rest_ns: the work from this trial to the next.
        trial_ns: the least work of each thread in a trial.
        own_ns: the time that the inline consumer needs for other things between two batches.
        factor: the echoing factor that ranks agreed on last (see ``rank_sync``), or None.
        grown: the number of threads after more were added; 0 if none were.
        process_trial: what the first process showed of the user's code; None without one.
        processes: how many processes run the user's code; 0: it stays inline; None while undecided.
        most_processes: how many there are if the loop leaves them all cores; 0 if there is nothing
            to decide: the user named a number, the code waits, or one fewer was too few.
    """

    def __init__(self) -> None:
        self.factor: int | None = None
        self.processes: int | None = None
        self.most_processes = 0
        self.process_trial: ProcessTrial | None = None
        self.costs: dict[int, CostEstimate] = {}
        self._misses = 0
        self._forget()

    def _forget(self) -> None:
        self.active: int | None = None
        self.grown = 0
        self.is_settled = False
        self.trial: Trial | None = None
        self.rest_ns = 0
        self.trial_ns = _TRIAL_NS
        self.own_ns = 0.0
        self._speedups: deque[float] = deque(maxlen=_VOTES)
        self._rest_ns = _REST_NS
        self._verdicts: deque[int] = deque(maxlen=_VOTES)

    def begin_epoch(self, misses: int) -> None:
        """Forget the measurements if a cache missed examples in the epoch before."""
        if misses != self._misses:
            self._misses = misses
            self._forget()
            self.costs.clear()

    def spare_core(self, loop: LoopTime, worked_ns: float) -> None:
        """Leave the loop a core in the next epoch if it needs one, and one process fewer keeps up.

        Args:
            loop: how the consumer spent this epoch.
            worked_ns: the processor time of all worker processes in it.
        """
        if self.most_processes < 2:
            return
        if self.processes != self.most_processes and loop.waits:  # one fewer was too few
            self.processes, self.most_processes = self.most_processes, 0
            return
        needs_core = loop.busy_ns > _BUSY * loop.elapsed_ns and not loop.waits
        keeps_up = worked_ns <= (self.most_processes - 1) * loop.cpu_ns
        self.processes = self.most_processes - (needs_core and keeps_up)

    def cost(self, segment: int, rows_per_batch: int, uses: float = 1.0) -> CostEstimate:
        """Return the cost of a segment, which is kept between epochs."""
        return self.costs.setdefault(segment, CostEstimate(rows_per_batch, uses))

    def note_own(self, own_ns: float, batch_ns: float) -> None:
        """Record how long the consumer did something else between two batches of this cost.

        A single long pause, as between epochs, changes the mean little.
        """
        # A fifth of each, as of the cost of a row.
        self.own_ns += 0.2 * (min(own_ns, 2 * self.own_ns + batch_ns) - self.own_ns)

    @property
    def speedup(self) -> float | None:
        """The speed of all threads as a multiple of one, by the last trials; None if unknown."""
        found = sorted(self._speedups)[len(self._speedups) // 2 :][:1]
        return found[0] if found and found[0] < math.inf else None

    def judge(self, threads: int, speedup: float | None) -> None:
        """Record the verdict of a trial. The majority of the last ones counts; in a tie, more.

        Args:
            threads: how many are to take part.
            speedup: see ``Trial``.
        """
        if threads:
            self._speedups.append(math.inf if speedup is None else speedup)
            self._verdicts.append(threads)
            self.active = max(self._verdicts, key=lambda each: (self._verdicts.count(each), each))
            self.rest_ns, self.trial_ns = self._rest_ns * self.active, _LATER_TRIAL_NS
        else:
            self._speedups.clear()
            self._verdicts.clear()
            self.active, self.rest_ns, self.trial_ns = None, self._rest_ns, _TRIAL_NS
        self._rest_ns = min(2 * self._rest_ns, _LONGEST_REST_NS)

    def grow(self, threads: int) -> None:
        """Raise the number of threads above the one asked for; forget earlier verdicts."""
        self.grown = threads
        self._verdicts.clear()
        self._speedups.clear()

    def settle(self, threads: int) -> None:
        """Set for good how many threads take part."""
        self.active, self.is_settled = threads, True


class Tuning:
    """Decides how many threads of one run take part. All of it runs under the pool's lock.

    Args:
        limit: the number of threads.
        autotuner: the measurements of the run's segments; keeps the decision.
        clock_ns: the clock, in nanoseconds.
        may_grow: returns whether the pool may have so many threads for work of this cost; None if
            ``limit`` is fixed.
        delay_ns: the time that the calling thread has waited for a processor so far.

    Attributes:
        active: how many threads take part now.
        is_over: whether ``active`` stays.
    """

    def __init__(
        self,
        limit: int,
        autotuner: Autotuner,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        may_grow: Callable[[int, CostEstimate], bool] | None = None,
        delay_ns: Callable[[], int] = thread_delay_ns,
    ) -> None:
        self._limit = limit = max(limit, autotuner.grown if may_grow is not None else 0)
        self._may_grow = may_grow
        self._autotuner = autotuner
        self._clock_ns = clock_ns
        self._delay_ns = delay_ns
        self._delayed_ns = 0
        self._unlooked_ns = _LOOK_NS
        self._looked_ns: int | None = None
        self._outputs = self._making_ns = 0  # since the last look
        self.active = min(autotuner.active or 0, limit)
        if self.trial is not None:
            self.trial.resume()
            if may_grow is not None:  # the trial may have tried more threads
                self._limit = limit = max(limit, self.trial.threads)
            self.active = min(self.trial.threads, limit)

    @property
    def trial(self) -> Trial | None:
        """The running trial, if any; measurements then need the threads' busy time, too."""
        return self._autotuner.trial

    @property
    def is_over(self) -> bool:
        return self._autotuner.is_settled

    def note(
        self,
        cost: CostEstimate,
        rows: int,
        wall: int,
        busy: int = 0,
        trial: Trial | None = None,
        cpu: int = 0,
        waited: int = 0,
    ) -> bool:
        """Add a measurement; return whether ``active`` may have changed.

        Args:
            cost: the cost of the segment whose rows were computed.
            rows: the number of rows.
            wall: their time, in nanoseconds.
            busy: in a trial, the time in which the thread had a processor or waited for one.
            trial: the trial that ran when the rows were begun.
            cpu: in a trial, the time in which the thread had a processor.
            waited: the time that the consumer has waited so far.
        """
        if self.active == 0:
            return self._leaves_inline(cost, wall)
        now = self.trial
        if now is None:
            self._autotuner.rest_ns -= wall
            return self._autotuner.rest_ns <= 0 and self._try(self._limit)
        if trial is not now:
            return False
        now.note(cost, rows, wall, busy, cpu, self._clock_ns(), waited)
        if not now.over:
            return False
        if now.fewer is not None:
            is_faster = now.rows_per_ns > _FASTER * now.fewer.rows_per_ns
            threads = self._limit = now.threads if is_faster else now.fewer.threads
            self._autotuner.grow(threads)
        elif not now.is_clear:
            return self._try(1, before=now)
        else:
            threads = now.verdict(self._limit, self._autotuner.own_ns)
        if threads == self._limit and self._grows(now.with_all, cost):
            return True
        self._autotuner.trial = None
        self._autotuner.judge(threads, now.speedup)
        self.active = self._autotuner.active or 0
        if not threads:  # until a batch turns out to be costly after all
            self._looked_ns, self._unlooked_ns = None, _LOOK_NS
        return True

    def made_here(self, outputs: int, wall: int) -> None:
        """Record how long the consumer took to make outputs, the engine's own work included."""
        self._outputs += outputs
        self._making_ns += wall

    def _grows(self, trial: Trial, cost: CostEstimate) -> bool:
        """Start a trial of twice as many threads, if these sleep and more are allowed."""
        more = 2 * trial.threads
        if self._may_grow is None or trial.threads != self._limit or not trial.sleeps:
            return False
        if not self._may_grow(more, cost):
            return False
        self._limit = self.active = more
        self._autotuner.trial = Trial(more, self._autotuner.trial_ns, fewer=trial)
        return True

    def _try(self, threads: int, before: Trial | None = None) -> bool:
        self._autotuner.trial = Trial(threads, self._autotuner.trial_ns, before)
        self.active = threads
        return True

    def _leaves_inline(self, cost: CostEstimate, wall: int) -> bool:
        tuner = self._autotuner
        tuner.rest_ns -= wall
        self._unlooked_ns += wall
        if self._unlooked_ns < _LOOK_NS:
            return False
        outputs, making_ns, before_ns = self._outputs, self._making_ns, self._looked_ns
        self._outputs = self._making_ns = self._unlooked_ns = 0
        self._looked_ns = self._clock_ns()
        costs = tuner.costs.values()
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
            tuner.note_own(max(0, own_ns) / outputs, batch_ns)
        if not known or (batch_ns <= INLINE_BATCH_NS and not self._can_hide(batch_ns)):
            return False
        self.active = self._limit
        if all(each.is_parallel for each in costs):  # then there is nothing to try
            tuner.settle(self.active)
        return True

    def _held_up_ns(self) -> int:
        """Return how long the consumer has waited for a processor since this was asked last.

        Other programs had it: threads of this one would have had to wait, too.
        """
        before, self._delayed_ns = self._delayed_ns, self._delay_ns()
        return self._delayed_ns - before

    def _can_hide(self, batch_ns: float) -> bool:
        """Whether threads could make batches while the consumer does something else."""
        own_ns = self._autotuner.own_ns
        is_worth = batch_ns > max(_HIDDEN_NS, _WORTH_HIDING * (own_ns + batch_ns))
        return is_worth and own_ns > batch_ns and self._autotuner.rest_ns <= 0
