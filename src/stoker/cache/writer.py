"""The writer thread of a process: it writes the items that workers offer to a store."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from stoker.basics.future import start_thread
from stoker.basics.signals import defer_interrupts
from stoker.cache.layout import StoredItem
from stoker.cache.store import Store, StoreLocked

QUEUE_BYTES = 32 << 20
"""The most bytes that wait: 8 batches. Further items are refused, so the queue takes no more
memory."""
# The size of a batch: about 40 items of 110 KB share one wake-up, or one request: sent one by one,
# items of 110 KB cost 2.2 times the processor time, and items of 3 KB 15 times.
_BATCH_BYTES = 4 << 20
# How long an item waits for others. It is not read before the next epoch. Chosen, not measured.
_BATCH_DELAY_S = 0.05
# The wait before a busy store is tried again: another process's commit of 1 MiB (ten items of
# 110 KB at 36 us each) is over by then.
_BUSY_S = 0.002
# How long the thread's very end is waited for. Not for ever: the collector may have come to close a
# cache within `threading.enumerate`, which has the lock that a thread needs to end.
_END_S = 1.0

Item = TypeVar("Item")


class BatchQueue(Generic[Item]):
    """Items that wait until one thread takes them, several at a time. ``put`` never waits.

    Args:
        size_of: returns an item's bytes.

    Attributes:
        lock: guards the queue.
        changed: the condition over the lock; notified by each change.
        is_closed: whether nothing is taken any more.
    """

    def __init__(self, size_of: Callable[[Item], int]) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.is_closed = False
        self._size_of = size_of
        self._items: deque[Item] = deque()
        self._bytes = 0  # with the items that were taken last
        self._is_flushing = False

    def put(self, item: Item) -> bool:
        """Queue an item; False if the queue is full."""
        size = self._size_of(item)
        with self.lock:
            if self.is_closed or self._bytes + size > max(QUEUE_BYTES, size):
                return False
            self._items.append(item)
            self._bytes += size
            if len(self._items) == 1 or self._bytes >= _BATCH_BYTES:
                self.changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all items are done with; False after the timeout."""
        with self.lock:
            self._is_flushing = True
            self.changed.notify_all()
            is_done = self.changed.wait_for(lambda: not self._bytes or self.is_closed, timeout_s)
            self._is_flushing = False
        return is_done

    def take_all(self, handle: Callable[[list[Item]], None]) -> None:
        """Have ``handle`` take items, batch by batch, until the queue is closed."""
        while True:
            with self.lock:
                self.changed.wait_for(lambda: self._items or self.is_closed)
                self.changed.wait_for(self._has_enough, _BATCH_DELAY_S)
                if self.is_closed:
                    return
                batch, size = [], 0
                while self._items and size < _BATCH_BYTES:
                    batch.append(self._items.popleft())
                    size += self._size_of(batch[-1])
            try:
                handle(batch)
            finally:
                with self.lock:
                    # A `put` that Ctrl-C interrupted may have added its bytes but not its item. An
                    # empty queue has 0 bytes, whatever the sum says.
                    self._bytes = self._bytes - size if self._items else 0
                    self.changed.notify_all()

    def close(self) -> None:
        """Drop the items that still wait, and take no more."""
        with self.lock:
            self.is_closed = True
            self._items.clear()
            self.changed.notify_all()

    def _has_enough(self) -> bool:
        return self.is_closed or self._is_flushing or self._bytes >= _BATCH_BYTES


class Writer:
    """Writes items to a store, several at a time. ``offer`` never waits.

    Its thread calls ``on_refused`` with what each write refused, and ``on_failure`` with the
    reason if no more items can be written.
    """

    def __init__(
        self,
        store: Store,
        on_refused: Callable[[list[StoredItem]], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._store = store
        self._on_refused = on_refused
        self._on_failure = on_failure
        self._queue: BatchQueue[StoredItem] = BatchQueue(lambda item: item.size_bytes)
        self._thread: threading.Thread | None = None

    def offer(self, item: StoredItem) -> bool:
        """Queue an item; False if the queue is full."""
        with self._queue.lock:
            if not self._queue.put(item):
                return False
            if self._thread is None:
                with defer_interrupts():
                    self._thread = start_thread("stoker-cache", self._run)
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all offered items are written; False after the timeout."""
        return self._queue.flush(timeout_s)

    @property
    def is_here(self) -> bool:
        """True if the caller runs in the writer's thread."""
        return self._thread is threading.current_thread()

    def close(self, timeout_s: float) -> None:
        """Write the queued items, for at most ``timeout_s``, and end the thread."""
        self.flush(timeout_s)
        thread = self._thread
        self._queue.close()
        with self._queue.lock:
            self._queue.changed.wait_for(lambda: self._thread is None)
        if thread is not None:
            thread.join(_END_S)

    def before_fork(self) -> None:
        """Pause the thread, so that no lock is held and no write is under way at the fork."""
        self._queue.lock.acquire()

    def after_fork(self) -> None:
        self._queue.lock.release()

    def _run(self) -> None:
        try:
            self._queue.take_all(self._write)
        finally:
            with self._queue.lock:
                self._thread = None
                self._queue.changed.notify_all()

    def _write(self, batch: list[StoredItem]) -> None:
        while not self._queue.is_closed:
            try:
                refused = self._store.add(batch)
            except StoreLocked:
                time.sleep(_BUSY_S)
            except OSError as error:
                self._on_refused(batch)
                return self._on_failure(error)
            else:
                return self._on_refused(refused)
