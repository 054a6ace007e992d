"""The writer thread of a process: it writes the items that workers offer to a store."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from stoker.basics.future import start_thread
from stoker.basics.signals import defer_interrupts
from stoker.cache.layout import StoredItem
from stoker.cache.store import Store, StoreLocked, WriteResult

QUEUE_BYTES = 32 << 20
"""The most bytes that wait to be written: 8 writes. Further items are refused, so the queue takes
no more memory."""
# The size of a write: about 40 items of 110 KB share one wake-up. Chosen, not measured.
_COMMIT_BYTES = 4 << 20
# How long an item waits for others to be written with it. It is not read before the next epoch.
# Chosen, not measured.
_BATCH_DELAY_S = 0.05
# The wait before a busy store is tried again: another process's commit of 1 MiB (ten items of
# 110 KB at 36 us each) is over by then.
_BUSY_S = 0.002
# How long the thread's very end is waited for. Not for ever: the collector may have come to close a
# cache within `threading.enumerate`, which has the lock that a thread needs to end.
_END_S = 1.0


class Writer:
    """Writes items to a store, several at a time. ``offer`` never waits.

    Its thread calls ``on_written`` with the result of each write, and ``on_failure`` with the
    reason if no more items can be written.
    """

    def __init__(
        self,
        store: Store,
        on_written: Callable[[WriteResult], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._store = store
        self._on_written = on_written
        self._on_failure = on_failure
        self._queue: deque[StoredItem] = deque()
        self._queued_bytes = 0  # with the items that are being written
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._is_flushing = False
        self._closed = False

    def offer(self, item: StoredItem) -> bool:
        """Queue an item; False if the queue is full."""
        with self._lock:
            if self._closed or self._queued_bytes + item.size_bytes > max(
                QUEUE_BYTES, item.size_bytes
            ):
                return False
            self._queue.append(item)
            self._queued_bytes += item.size_bytes
            if self._thread is None:
                with defer_interrupts():
                    self._thread = start_thread("stoker-cache", self._run)
            if len(self._queue) == 1 or self._queued_bytes >= _COMMIT_BYTES:
                self._changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all offered items are written; False after the timeout."""
        with self._lock:
            self._is_flushing = True
            self._changed.notify_all()
            written = self._changed.wait_for(lambda: not self._queued_bytes, timeout_s)
            self._is_flushing = False
        return written

    @property
    def is_here(self) -> bool:
        """True if the caller runs in the writer's thread."""
        return self._thread is threading.current_thread()

    def close(self, timeout_s: float) -> None:
        """Write the queued items, for at most ``timeout_s``, and end the thread."""
        self.flush(timeout_s)
        thread = self._thread
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None)
        if thread is not None:
            thread.join(_END_S)

    def before_fork(self) -> None:
        """Pause the thread, so that no lock is held and no write is under way at the fork."""
        self._lock.acquire()

    def after_fork(self) -> None:
        self._lock.release()

    def _run(self) -> None:
        try:
            self._write_what_comes()
        finally:
            with self._lock:
                self._thread = None
                self._changed.notify_all()

    def _write_what_comes(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._queue or self._closed)
                self._changed.wait_for(self._has_enough, _BATCH_DELAY_S)
                if self._closed:
                    return
                batch, size = [], 0
                while self._queue and size < _COMMIT_BYTES:
                    batch.append(self._queue.popleft())
                    size += batch[-1].size_bytes
            try:
                self._write(batch)
            finally:
                with self._lock:
                    # An `offer` that Ctrl-C interrupted may have added its bytes but not its item.
                    # An empty queue has 0 bytes, whatever the sum says.
                    self._queued_bytes = self._queued_bytes - size if self._queue else 0
                    self._changed.notify_all()

    def _has_enough(self) -> bool:
        return self._closed or self._is_flushing or self._queued_bytes >= _COMMIT_BYTES

    def _write(self, batch: list[StoredItem]) -> None:
        while not self._closed:
            try:
                added = self._store.add(batch)
            except StoreLocked:
                time.sleep(_BUSY_S)
            except OSError as error:
                self._on_written(WriteResult(0, 0, batch))
                return self._on_failure(error)
            else:
                self._on_written(added)
                return self._free_pages(batch)

    def _free_pages(self, batch: list[StoredItem]) -> None:
        """Drop the files of stored items from the page cache: they will not be read again."""
        with_files = [item for item in batch if item.file is not None]
        if not with_files:
            return
        is_stored = self._store.holds([item.key for item in with_files])
        for item in itertools.compress(with_files, is_stored):
            with contextlib.suppress(OSError):
                descriptor = os.open(str(item.file), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
