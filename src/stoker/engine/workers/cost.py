"""The measured cost of a segment's work, and samples of its workers' time.

Now and then a worker takes the clocks of its thread for a chunk of work (``ThreadTimer``), which
stands for the chunks before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from stoker.stats import WorkerTime

# As long as one chunk of a thread: less work than that is not divided further. Threads that gather
# rows wait for memory that the other ones wrote: below this two took 1.2 to 2.1 times the processor
# time, and from 0.6 to 1.3 times as long.
INLINE_BATCH_NS = 1_000_000
# Smaller images are mostly Python's own work, under the GIL. Chosen, not measured.
IMAGE_ROW_NS = 200_000
# Pieces until one costs as much as later ones. The first batch of rows that are only copied took 40
# times as long (bench/echo_overhead.py).
FIRST_NOTES = 2
TIMED = slice(-5, -1)
"""The counters of a segment that hold its samples: rows, and the three times of ``ThreadTimer``."""
# Work of each thread without a sample: a sample costs 20 to 50 us, so under 0.3 %; and it releases
# the GIL six times, so the threads together must not take more of them the more they are.
SAMPLED_NS = 16_000_000


class CostEstimate:
    """Measured work of one segment, kept from epoch to epoch.

    Args:
        rows_per_batch: how many of its rows a batch has.
        uses: how often each of them is used: so many fewer are made for a batch.
    """

    def __init__(self, rows_per_batch: int, uses: float = 1.0) -> None:
        self.rows_per_batch = rows_per_batch / uses
        self.row_ns: float | None = None
        self.least_row_ns = math.inf
        self.inline_row_ns: float | None = None  # done by the consumer, without other threads
        self.asleep_row_ns: float | None = None  # by a trial with a single thread
        self.whole = False  # whether a task is one chunk, however many rows its batch has
        self.light = False  # whether rows are only copied, so that first chunks may be large
        self.chunk_rows = rows_per_batch  # the largest chunk
        self.releases_gil = False  # whether almost all of it is done without the GIL
        self.gil_row_ns = 0  # if so: rows must take longer than this, the part that needs the GIL
        self.work_ns = 0
        self.rows = 0
        self.notes = 0  # how often some were measured
        self.read_bytes = 0
        self.output_bytes: int | None = None  # of a finished output

    def chunk(self, target_ns: int) -> int:
        """Return how many rows make a chunk."""
        if self.whole:
            return self.chunk_rows
        if self.row_ns is None:
            return self.chunk_rows if self.light else 1
        return max(1, min(self.chunk_rows, int(target_ns / max(self.row_ns, 1.0))))

    @property
    def is_parallel(self) -> bool:
        """Whether threads are sure to be faster, without a trial."""
        return self.releases_gil and (self.row_ns or 0.0) >= self.gil_row_ns

    def batch_ns(self) -> float:
        """Return the cost of a batch, 0 while it is unknown."""
        return (self.row_ns or 0.0) * self.rows_per_batch

    def row_bytes(self) -> float:
        """Return the mean bytes read for a row."""
        return self.read_bytes / max(1, self.rows)

    def note(self, rows: int, work_ns: int, read_bytes: int = 0) -> None:
        """Add a measurement."""
        self.read_bytes += read_bytes
        each = work_ns / rows
        self.least_row_ns = min(self.least_row_ns, each)
        if self.row_ns is None or self.rows < 8 or self.notes < FIRST_NOTES:
            # The first are slow: imports, caches.
            self.row_ns = each if self.row_ns is None else min(self.row_ns, each)
        else:
            # A longer time may mean that another process had the processor: the work is the same.
            # A fifth of each: some ten chunks follow a change. Chosen, not measured.
            self.row_ns += 0.2 * (min(each, 2 * self.row_ns) - self.row_ns)
        self.rows += rows
        self.notes += 1
        self.work_ns += work_ns


def worker_time(
    spent: Mapping[int, list[int]], costs: Mapping[int, CostEstimate], sharing: int
) -> WorkerTime | None:
    """Return how workers spent their time; None without samples.

    Args:
        spent: the counters of each segment.
        costs: the cost of each segment.
        sharing: how many workers share one GIL.
    """
    asleep_ns, are_told_apart = 0.0, True
    sums = np.zeros(3)
    for part, counters in spent.items():
        rows, *times = counters[TIMED]
        if not rows:
            continue
        wall_ns, running_ns, _ = times
        sums += times
        blocked_ns = max(0, wall_ns - running_ns)
        alone_ns = costs[part].asleep_row_ns if part in costs else None  # a new epoch forgets them
        # If half a processor does all of the work, the GIL is free most of the time.
        if sharing < 2 or sharing * running_ns < 0.5 * wall_ns:
            asleep_ns += blocked_ns
        elif alone_ns is not None:
            asleep_ns += min(blocked_ns, alone_ns * rows)
        else:
            are_told_apart = False
    wall, running, cpu = sums.tolist()
    if not wall:
        return None
    running = min(wall, running)
    cpu = min(cpu, running)
    blocked = wall - running
    asleep = min(blocked, asleep_ns) / wall if are_told_apart else None
    return WorkerTime(wall / 1e9, cpu / wall, (running - cpu) / wall, blocked / wall, asleep)
