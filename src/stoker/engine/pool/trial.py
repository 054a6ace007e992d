"""Trials of threads, and what follows from them: none, one or all of them are to take part.

Examples differ, and other programs run. So two trials are not compared by how long their rows took,
but by how much longer than their threads had, or wanted, a processor: that is how long they waited
for each other. Threads that take the GIL from one another all the time need far more of the
processor for the same, beyond what examples differ: that counts, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.engine.pool.cost import INLINE_BATCH_NS, CostEstimate

_TRIAL_TASKS = 12
_CLEARLY = 0.9  # of the time: what counts as faster
_THEIRS = 2.5  # times the work of threads: so much slower they can make the consumer
_BURNS = 1.4  # of a row's processor time: what examples do not differ by in the mean
_COMPUTES = 0.5  # of its time, a thread alone; else threads may well wait for storage
_CERTAINLY = 0.6  # of the time that one thread would take at best: then it is not tried


def choose_threads(
    limit: int,
    work_ns: Mapping[int, float],
    inline_ns: float,
    own_ns: float = 0.0,
    period_ns: float = 0.0,
) -> int:
    """Return how many threads are to take part; 0: none, the consumer does the work.

    Args:
        limit: how many there are.
        work_ns: the work of a batch, summed over the threads that do it, by how many take part:
            for all of them, and for a single one where that was tried.
        inline_ns: the same for the consumer alone; 0: not known.
        own_ns: what the consumer does between two batches, besides.
        period_ns: how long it was from one batch to the next in the last of these trials.
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
    # What is beyond that is its own work, which has become more.
    takes_ns = max(batch_ns, period_ns if best == min(work_ns) else 0.0)
    is_theirs = takes_ns <= own_ns + _THEIRS * max(batch_ns, inline_ns)
    return 0 if is_theirs and takes_ns > own_ns + _CLEARLY * inline_ns else best


class _Spent:
    """What rows of one segment took of time; for how long threads had or wanted a processor."""

    def __init__(self) -> None:
        self.rows = self.wall = self.busy = self.cpu = 0

    def add(self, rows: int, wall: int, busy: int, cpu: int) -> None:
        self.rows += rows
        self.wall += wall
        self.busy += busy
        self.cpu += cpu

    def slowed(self, other: _Spent) -> float:
        """Return how much longer rows took than they had to, compared with the other trial."""
        waited = self.wall / max(1, self.busy)
        burnt = self.cpu * other.rows / max(1, other.cpu * self.rows)
        return waited * burnt if burnt > _BURNS else waited


class Trial:
    """Work measured while a given number of threads took part.

    Args:
        threads: how many.
        least_ns: of work of each of them.
        before: the trial with all of them, if this is the one with a single thread.

    Attributes:
        speedup: once there is a verdict, how many times as fast all of them were as the single one;
            None where only one number was tried, or where even that one did not compute mostly.
    """

    def __init__(self, threads: int, least_ns: int, before: Trial | None = None) -> None:
        self.threads = threads
        self._least_ns = threads * least_ns
        self._before = before
        self.speedup: float | None = None
        self._pieces = 0
        self._all = _Spent()
        self._each: dict[CostEstimate, _Spent] = {}
        # From one piece to the next of the same epoch: the time, what of it the consumer waited,
        # and the work that was done.
        self._latest: tuple[int, int] | None = None
        self._period_ns = self._waited_ns = self._work_ns = 0

    def resume(self) -> None:
        """Go on in another epoch."""
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
        """Take a measurement in; and how long the consumer has waited in this epoch so far."""
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
        """Whether it was long enough."""
        return self._pieces >= _TRIAL_TASKS and self._all.wall >= self._least_ns

    @property
    def is_clear(self) -> bool:
        """Whether one thread need not be tried, too."""
        if self.threads == 1 or self._all.busy < 0.5 / self.threads * self._all.wall:
            return True  # more of those that mostly sleep always help
        each = self._each.items()
        work_ns = sum(spent.wall / spent.rows * cost.rows_per_batch for cost, spent in each)
        least_ns = sum(spent.busy / spent.rows * cost.rows_per_batch for cost, spent in each)
        return work_ns / self.threads <= _CERTAINLY * least_ns

    def verdict(self, limit: int, own_ns: float) -> int:
        """Return how many threads are to take part; for ``own_ns`` see ``Autotuner``.

        Of that the consumer has no more than it did not wait for batches in this trial.
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
        """Return what a row costs the consumer, 0 where it never made one.

        What it made first may have cost more than later ones do: files were opened, caches were
        empty. It would not take longer than a thread alone.
        """
        spent, made = self._each[cost], cost.inline_row_ns or 0.0
        return min(made, spent.wall / spent.rows) if self.threads == 1 else made
