"""Where a worker is: the stage and the row that it works on, read by a watch (``workers.watch``).

The worker writes a few integers, and the watch compares them from time to time: what has not
changed for long is stuck. A worker process has them in memory that it shares with its parent.
"""

from __future__ import annotations

import threading
from collections.abc import MutableSequence

IDLE = -1
"""The stage of a worker that waits, or delivers: nothing that a user's function could hold up."""
CELLS = 4
"""The number of integers: a count of changes, the stage, the row, and the slot of its request."""


class WorkerStatus:
    """What one worker is at.

    Args:
        cells: ``CELLS`` integers, which the worker alone writes.
    """

    __slots__ = ("cells",)

    def __init__(self, cells: MutableSequence[int]) -> None:
        self.cells = cells
        cells[1] = IDLE

    def enter(self, stage: int) -> None:
        """Begin the work of a stage on the row, by the stage's number in ``Segment.names``."""
        cells = self.cells
        cells[1] = stage
        cells[0] += 1

    def leave(self) -> None:
        """End a stage's work."""
        self.enter(IDLE)

    def at_row(self, row: int, slot: int) -> None:
        """Come to another row of the request of a slot."""
        cells = self.cells
        cells[2], cells[3] = row, slot
        cells[0] += 1


class _CurrentWorker(threading.local):
    status: WorkerStatus | None = None


current_worker = _CurrentWorker()
"""The status of the calling thread; None where nobody watches."""
