"""Heads of a flow: sources that are read one item after another, and a thread that reads ahead."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from stoker.basics.future import start_thread
from stoker.basics.process import WORKER_NAME
from stoker.basics.signals import defer_interrupts
from stoker.engine.items import (
    DrivenStream,
    EpochCounters,
    Item,
    Planning,
    PulledStream,
    WouldBlock,
)
from stoker.engine.setup import EpochSetup
from stoker.engine.workers.threads import WorkerPool
from stoker.sources.origin import SourceBase

# The longest time that closing waits for a loader's next() to return: about as long as a user waits
# without a message. Chosen, not measured.
_JOIN_S = 5.0


class HeadSource(SourceBase):
    """A source that is iterated: of examples, or of ready batches."""

    @abstractmethod
    def head(self, setup: EpochSetup, tally: EpochCounters) -> SequentialStream:
        """Begin a pass of an epoch; ``tally`` counts time.

        Raises StateError if it cannot begin where it should.
        """


class SequentialStream(DrivenStream):
    """The stream at the head of a flow: a source that is read one item after another.

    The source is read when an item is taken, so at most one item is ready: one that was peeked at.
    """

    is_full = False

    def poll(self, count: int) -> tuple[int, bool]:
        return min(count, int(self._next_item is not None)), False

    def wait_for(self, count: int) -> None:
        """Do nothing."""

    def ready_since(self) -> tuple[int, int | None]:
        return 0, None

    def recompute(self, number: int) -> Item:
        """Refuse: states that would need this are refused before."""
        raise AssertionError("what can only be iterated cannot be made again")

    @abstractmethod
    def has_ended(self) -> bool:
        """True if the source is exhausted. An item or error that this reads comes next."""

    def loaded_with(self, item: Item, loaded: int) -> int:
        """Return the number of a loader's batches that are handed out with ``item``."""
        return loaded

    @abstractmethod
    def state_at(self, fresh: int, loaded: int) -> tuple[Any, int]:
        """Return the source's own state after so many examples and batches, or None.

        Also return the number of reads before that state.
        """

    def forget_states(self, fresh: int, loaded: int) -> None:
        """Drop the states after fewer examples, and after fewer batches of a loader."""

    def has_raised(self, error: BaseException) -> bool:
        """True if the source raised this error, and may go on. True only once for each error."""
        return False

    def leave(self, fresh: int, loaded: int, *, ended: bool) -> None:
        """Tell the source how far the consumer got, or that the pass ``ended`` by itself.

        It may have been read further.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Interrupt another thread that waits for the source, if possible."""


class Prefetcher(PulledStream):
    """A stream that a background thread prefetches into a bounded queue.

    So planning never blocks on it. It is used where an adaptive echo follows a loader or a stream.
    The thread alone reads the inner stream, and closes it; others ask for its states and interrupt
    it. The thread never takes the planning lock.

    An exception of the inner stream is queued, and raised at its place. Reading then continues,
    because a loader may recover.

    Args:
        inner: the stream to read.
        size: the largest number of items in the queue. It holds more only while a caller waits for
            more at a time.
        planning: tells whether the planner may block.
        worker_pool: notified to plan when an item has arrived.
    """

    def __init__(
        self, inner: SequentialStream, size: int, planning: Planning, worker_pool: WorkerPool
    ) -> None:
        self._inner = inner
        self.size = size
        self._planning = planning
        self._worker_pool = worker_pool
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._queue: deque[Item | BaseException] = deque()
        self._room = size  # larger while a caller waits for more than that
        self._has_ended = False
        self._is_closed = False
        self._fresh = 0
        self._arrived_ns = 0
        self._thread: threading.Thread | None = None

    @property
    def fresh(self) -> int:
        return self._fresh

    def poll(self, count: int) -> tuple[int, bool]:
        self._begin()
        with self._lock:
            ready = len(self._queue)
            return min(count, ready), self._has_ended and ready <= count

    def wait_for(self, count: int) -> None:
        """Wait until the next ``count`` items are ready, or all that are left, or an error."""
        self._begin()
        with self._lock:
            if count > self._room:
                self._room = count
                self._change.notify_all()
            while not self._is_there(count):
                if not self._planning.may_block:
                    raise WouldBlock(None)
                self._change.wait()

    @property
    def is_full(self) -> bool:
        return len(self._queue) >= self.size

    def ready_since(self) -> tuple[int, int | None]:
        with self._lock:
            ready = len(self._queue)
            return ready, self._arrived_ns if ready >= self.size else None

    def pull(self, *, may_block: bool = True) -> Item | None:
        """Return the next item, None at the end; raise an error of reading at its place."""
        if not may_block:
            ready, ended = self.poll(1)
            if not ready and not ended:
                raise WouldBlock(None)
        return next(self.pull_many(1), None)

    def pull_many(self, count: int) -> Iterator[Item]:
        self.wait_for(count)
        while count:
            with self._lock:
                if not self._queue:
                    return
                item = self._pop()
            if isinstance(item, BaseException):
                raise item
            self._fresh = item.fresh
            yield item
            count -= 1

    def peek(self) -> Item | None:
        """Return the next item without taking it; raise an error of reading at its place."""
        self.wait_for(1)
        with self._lock:
            first = self._queue[0] if self._queue else None
            if isinstance(first, BaseException):
                self._pop()
                raise first
            return first

    def recompute(self, number: int) -> Item:
        """Refuse: states that would need this are refused before."""
        raise AssertionError("what a thread read ahead cannot be made again")

    def clear(self) -> None:
        """End the thread after its current read; drop the items in the queue."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._change.notify_all()
        thread = self._thread
        if thread is None:
            self._inner.clear()
        elif thread is not threading.current_thread():
            self._inner.interrupt()
            thread.join(_JOIN_S)

    def _pop(self) -> Item | BaseException:
        self._room = max(self.size, self._room - 1)
        self._change.notify_all()
        return self._queue.popleft()

    def _is_there(self, count: int) -> bool:
        if len(self._queue) >= count or self._has_ended or self._is_closed:
            return True
        return any(isinstance(item, BaseException) for item in islice(self._queue, count))

    def _begin(self) -> None:
        if self._thread is None and not self._is_closed:
            with defer_interrupts():
                self._thread = start_thread(f"{WORKER_NAME}-reading", self._read)

    def _read(self) -> None:
        try:
            while not self._has_ended and not self._is_closed:
                item: Item | BaseException | None
                try:
                    item = self._inner.pull()
                except BaseException as error:
                    item = error
                with self._lock:
                    self._arrived_ns = time.perf_counter_ns()
                    if item is None:
                        self._has_ended = True
                    elif not self._is_closed:
                        self._queue.append(item)
                    self._change.notify_all()
                self._worker_pool.plan()  # before waiting, as planning may make room
                with self._lock:
                    # A read error in it has to be raised first.
                    is_error = isinstance(item, BaseException)
                    item = None  # an error in it would keep this frame, and so the whole stream
                    while not (self._is_closed or self._has_ended) and (
                        len(self._queue) >= self._room or (is_error and self._queue)
                    ):
                        self._change.wait()
        finally:
            self._inner.clear()  # in this thread, which alone uses it
