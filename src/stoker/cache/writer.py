"""The writer thread: each process has one, which writes the items that workers offer."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from stoker.basics.signals import deferred
from stoker.cache.layout import StoredItem
from stoker.cache.store import Added, Busy, Store

QUEUE_BYTES = 32 << 20
"""Most bytes that wait to be written; items beyond that are refused. Memory that a process has
beside its own: 8 commits."""
# A look at the stored items and a wake-up are shared by some 40 items of 110 KB. Chosen, not
# measured.
_COMMIT_BYTES = 4 << 20
# An item is read again an epoch later: it may wait so long for others to be written with.
_GATHER_S = 0.05
# Another process's commit of 1 MiB, some ten items of 110 KB at 36 us each, is over by then.
_BUSY_S = 0.002


class Writer:
    """Writes items into a store, several in a commit. ``offer`` never waits.

    Its thread calls ``on_written`` with the result of each commit, and ``on_failure`` with the
    reason when no more can be written.
    """

    def __init__(
        self,
        store: Store,
        on_written: Callable[[Added], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._store = store
        self._on_written = on_written
        self._on_failure = on_failure
        self._queue: deque[StoredItem] = deque()
        self._bytes = 0  # of what waits and of what is being written
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._is_flushing = False
        self._closed = False

    def offer(self, item: StoredItem) -> bool:
        """Queue an item; False when there is no room for it now."""
        with self._lock:
            if self._closed or self._bytes + item.size_bytes > max(QUEUE_BYTES, item.size_bytes):
                return False
            self._queue.append(item)
            self._bytes += item.size_bytes
            if self._thread is None:
                with deferred():
                    thread = threading.Thread(target=self._run, name="stoker-cache", daemon=True)
                    thread.start()
                    self._thread = thread
            if len(self._queue) == 1 or self._bytes >= _COMMIT_BYTES:
                self._changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until the offered items are written; False after the timeout."""
        with self._lock:
            self._is_flushing = True
            self._changed.notify_all()
            written = self._changed.wait_for(lambda: not self._bytes, timeout_s)
            self._is_flushing = False
        return written

    @property
    def is_here(self) -> bool:
        """Whether the caller is the writer's own thread."""
        return self._thread is threading.current_thread()

    def close(self, timeout_s: float) -> None:
        """Write the waiting items, up to a time limit, and end."""
        self.flush(timeout_s)
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def before_fork(self) -> None:
        """Pause: a forked child would otherwise write copies of the waiting items."""
        self._lock.acquire()

    def after_fork(self) -> None:
        self._lock.release()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._queue or self._closed)
                self._changed.wait_for(self._has_enough, _GATHER_S)
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
                    # An offer that Ctrl-C broke off may have been counted wrong.
                    self._bytes = self._bytes - size if self._queue else 0
                    self._changed.notify_all()

    def _has_enough(self) -> bool:
        return self._closed or self._is_flushing or self._bytes >= _COMMIT_BYTES

    def _write(self, batch: list[StoredItem]) -> None:
        while not self._closed:
            try:
                added = self._store.add(batch)
            except Busy:
                time.sleep(_BUSY_S)
            except OSError as error:
                self._on_written(Added(0, 0, batch))
                return self._on_failure(error)
            else:
                self._on_written(added)
                return self._free_pages(batch)

    def _free_pages(self, batch: list[StoredItem]) -> None:
        """Drop from the page cache the files of items that are in the store by now."""
        of_files = [item for item in batch if item.file is not None]
        if not of_files or not hasattr(os, "posix_fadvise"):
            return
        there = self._store.holds([item.key for item in of_files])
        for item in itertools.compress(of_files, there):
            with contextlib.suppress(OSError):
                descriptor = os.open(str(item.file), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
