"""Streams whose items follow from the values of others: which survive, what is joined.

So planning may have to wait for values. A thread that must not block gets ``WouldBlock`` instead,
and planning is tried again when the value is there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator

from stoker.engine.items import Item, Planning, Stream, WouldBlock
from stoker.engine.pool.threads import Task, WorkerPool
from stoker.engine.stream import SegmentStream


class DecidedStream(Stream):
    """A stream of items that are decided upon in order, once what they are made of is there.

    Args:
        upstream: where that comes from.
        worker_pool: who computes it.
        planning: tells whether the planner may block.
    """

    def __init__(
        self, upstream: SegmentStream, worker_pool: WorkerPool, planning: Planning
    ) -> None:
        self._upstream = upstream
        self._worker_pool = worker_pool
        self._planning = planning
        self._arriving: deque[Item] = deque()
        self._kept: deque[Item] = deque()  # what is decided
        self._ended = False
        self._fresh: int | None = None

    @property
    def fresh(self) -> int:
        return self._upstream.fresh if self._fresh is None else self._fresh

    def pull_many(self, count: int) -> Iterator[Item]:
        self._have(count)
        for _ in range(min(count, len(self._kept))):
            item = self._kept.popleft()
            self._fresh = item.fresh
            yield item

    def poll(self, count: int) -> tuple[int, bool]:
        """Return how many of the next ``count`` items are ready, and if they are the last.

        Called with the planning lock held; never blocks.
        """
        may_block, self._planning.may_block = self._planning.may_block, False
        try:
            self._have(count)
        except WouldBlock:
            pass
        finally:
            self._planning.may_block = may_block
        kept = len(self._kept)
        return min(count, kept), self._ended and kept <= count

    def wait_for(self, count: int) -> None:
        self._have(count)

    @property
    def is_full(self) -> bool:
        return self._upstream.is_full

    def peek(self) -> Item | None:
        self._have(1)
        return self._kept[0] if self._kept else None

    def clear(self) -> None:
        self._arriving.clear()
        self._kept.clear()

    @abstractmethod
    def _decide(self, item: Item) -> None:
        """Take the next input, which is done, into account. What raises leaves it to come again."""

    @abstractmethod
    def _end(self) -> None:
        """Take into account that no more inputs come."""

    def _make(self) -> bool:
        """Make an item of inputs that were taken already; return whether there was one."""
        return False

    def _have(self, count: int) -> None:
        """Make ``count`` items available, or all that are left. May raise WouldBlock."""
        assert self._planning.is_held()
        while len(self._kept) < count and not self._ended:
            if self._make():
                continue
            if not self._arriving:
                self._arriving.extend(self._upstream.pull_many(count - len(self._kept)))
                if not self._arriving:
                    self._ended = True
                    self._end()
                    return
            task: Task = self._arriving[0].task
            if not task.done:
                if not self._planning.may_block:
                    raise WouldBlock(task)
                self._worker_pool.wait(task)
            self._decide(self._arriving[0])
            self._arriving.popleft()
