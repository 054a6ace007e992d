"""What the work of a segment costs, as measured, and from which cost on threads do it."""

from __future__ import annotations

INLINE_BATCH_NS = 1_000_000
GATHER_INLINE_BATCH_NS = 40_000  # gathering releases the GIL, and so gains from threads sooner
IMAGE_ROW_NS = 200_000  # smaller images are mostly Python's own work


class CostEstimate:
    """Measured work of one segment, kept from epoch to epoch."""

    def __init__(self, rows_per_batch: int) -> None:
        self.rows_per_batch = rows_per_batch
        self.row_ns: float | None = None
        self.inline_row_ns: float | None = None  # when the consumer did it, undisturbed
        self.asleep_row_ns: float | None = None  # by a trial with a single thread
        self.whole = False  # whether a chunk is always a whole batch
        self.light = False  # whether rows are but copied: nothing to be careful about at first
        self.chunk_rows = rows_per_batch  # at most
        self.releases_gil = False  # whether almost all of it is done without the GIL
        self.gil_row_ns = 0  # if so, from which time of a row on: what it needs the GIL for
        self.inline_ns = INLINE_BATCH_NS  # a batch that costs less is made inline
        self.work_ns = 0
        self.rows = 0

    def chunk(self, target_ns: int) -> int:
        """Return how many rows make a chunk."""
        if self.whole:
            return self.rows_per_batch
        if self.row_ns is None:
            return self.chunk_rows if self.light else 1
        return max(1, min(self.chunk_rows, int(target_ns / max(self.row_ns, 1.0))))

    @property
    def is_parallel(self) -> bool:
        """Whether threads are sure to do it faster."""
        return self.releases_gil and (self.row_ns or 0.0) >= self.gil_row_ns

    def batch_ns(self) -> float:
        """Return what a batch costs, 0 while that is not known."""
        return (self.row_ns or 0.0) * self.rows_per_batch

    def note(self, rows: int, work_ns: int) -> None:
        """Take a measurement in."""
        each = work_ns / rows
        if self.row_ns is None or self.rows < 8:  # the first are slow: imports, caches
            self.row_ns = each if self.row_ns is None else min(self.row_ns, each)
        else:
            # Once another process had the processor for a while, that is no news about the work.
            self.row_ns += 0.2 * (min(each, 2 * self.row_ns) - self.row_ns)
        self.rows += rows
        self.work_ns += work_ns
