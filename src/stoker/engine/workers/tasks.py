"""Tasks: groups of rows that workers compute, and which of their rows are claimed next.

A task becomes ready when the tasks that it needs are done. Downstream tasks go first, so that the
work nearest to the consumer is finished first. Rows are claimed in chunks of about a millisecond of
measured work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Long beside the tens of us that a claim costs, short beside a batch that several threads share.
# Chosen, not measured.
CHUNK_NS = 1_000_000
# The work of a chunk that does without the GIL: its few waits for the GIL are shared by as many
# rows. Beside a GPU and 14 threads, 18 photographs a chunk brought 1.39 times the examples of 8
# (bench/gpu.py).
_FREE_CHUNK_NS = 50_000_000
# Larger than CHUNK_NS: each chunk of a process costs two wake-ups and a copy, 0.4 ms of processor
# time beside one of torch's batches at 0.1 (bench/users_code.py). A chunk also ends an epoch alone.
PROCESS_CHUNK_NS = 50_000_000


@dataclass(slots=True, eq=False, repr=False)
class Task:
    """Rows to compute; their values go into ``values``.

    Attributes:
        runner: computes the rows, and has their cost (``segments.runner``).
        claimed, finished: the numbers of rows that workers have begun, and have finished.
        pending: the number of unfinished tasks that this one needs; ``waiting``: the tasks that
            need this one.
        done_ns: when it was done, by ``time.perf_counter_ns``.
        builder, batch: where its rows are written, if they make a batch.
        indices, items: the inputs of its rows: indices of examples in the source, or items.
        places, uses: the addresses of its rows (``Item``).
        failed: the failures of rows of its batches.
        kept: stored items whose uses end with the task, as it may be made again until then.
    """

    runner: Any
    number: int
    rows: int
    claimed: int = 0
    finished: int = 0
    pending: int = 0
    done: bool = False
    done_ns: int = 0
    waiting: list[Task] | None = None
    values: list[Any] = field(default_factory=list)
    builder: Any = None
    batch: Any = None
    indices: Any = None
    items: list[Any] | None = None
    places: Any = None
    uses: list[int] | None = None
    failed: dict[int, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)


class TaskQueue:
    """Tasks that are ready, and those that wait for others.

    Called under the worker pool's lock, but for ``next_rows`` of the only thread.

    Args:
        depths: the number of segments.
        target_ns: the work of a chunk that is sent to a process.
    """

    def __init__(self, depths: int, target_ns: int) -> None:
        self._target_ns = target_ns
        self._ready: list[deque[Task]] = [deque() for _ in range(depths)]
        self._is_closed = False

    def close(self) -> None:
        """Drop all tasks; later ones never become ready."""
        self._is_closed = True
        for queue in self._ready:
            queue.clear()

    def add(self, task: Task, needs: Iterable[Task]) -> bool:
        """Add a task; return whether it is ready: all tasks of ``needs`` are done."""
        for need in needs:
            if not need.done:
                if need.waiting is None:
                    need.waiting = []
                need.waiting.append(task)
                task.pending += 1
        return self._is_ready(task)

    def settle(self, task: Task) -> list[Task]:
        """Return the tasks that are ready now that this one is done."""
        waiting, task.waiting = task.waiting or [], None
        for waiter in waiting:
            waiter.pending -= 1
        return [waiter for waiter in waiting if self._is_ready(waiter)]

    def _is_ready(self, task: Task) -> bool:
        if task.pending or self._is_closed:
            return False
        self._ready[task.runner.depth].append(task)
        return True

    def claim(self, active: int, depth: int = 0) -> tuple[Task, range] | None:
        """Claim rows of a task of at least this depth; ``active`` threads take part."""
        for queue in reversed(self._ready[depth:]):
            if queue:
                task = queue[0]
                rows = self.next_rows(task, active)
                if rows.stop == task.rows:
                    queue.popleft()
                return task, rows
        return None

    def next_rows(self, task: Task, active: int) -> range:
        """Claim the next rows of a task."""
        start, cost = task.claimed, task.runner.cost
        target_ns = self._target_ns if task.runner.is_sent else CHUNK_NS
        rows = task.rows if cost.whole else cost.chunk(target_ns)
        if cost.releases_gil:
            # A chunk is read, cropped, and copied in one call each, without the GIL, which a call
            # waits for at its end: with many threads that took longer than the work (bench/gpu.py).
            # A thread that ends its share of a batch goes on with the next one.
            rows = max(rows, min(task.rows // max(1, active), cost.chunk(_FREE_CHUNK_NS)))
        # A short rest goes with it: an image of 32 x 32 takes a tenth less time.
        left = task.rows - start
        task.claimed = stop = start + (rows if left > rows + rows // 2 else left)
        return range(start, stop)
