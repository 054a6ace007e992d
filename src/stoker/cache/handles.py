"""The open stores of this process: all caches with the same folder share one handle.

There must be only one. A process that closes a file loses all its ``lockf`` locks on it, even those
taken through another descriptor, and the rows of ``counters`` are locked that way. Nor does LMDB
allow two environments of one folder in a process.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable

from stoker.basics.future import start_thread
from stoker.basics.resources import format_bytes
from stoker.basics.signals import Deferred, again_soon, defer_interrupts
from stoker.basics.warn import warn
from stoker.cache.counters import DAMAGED
from stoker.cache.layout import StoredItem
from stoker.cache.location import is_in_memory
from stoker.cache.store import Store
from stoker.cache.store_dir import StoreDir
from stoker.cache.writer import Writer
from stoker.errors import CacheWarning

# How long closing waits for the last items to be written: a process may end so much later. Chosen,
# not measured.
_CLOSE_S = 5.0


class Handle:
    """An open store, the thread that writes to it, and the lock on its folder.

    Attributes:
        is_alive: False once it is closed, and in a forked child of its process.
    """

    def __init__(self, store_dir: StoreDir) -> None:
        self.is_alive = True
        self.uses = 0
        self.store_dir = store_dir
        in_memory = is_in_memory(store_dir.folder)
        self.store = Store(store_dir.inside, store_dir.about.limit_bytes, in_memory=in_memory)
        self.writer = Writer(self.store, self._correct_counts, self._warn_failed)

    def is_of(self, folder: str) -> bool:
        """True if it is of the folder that is there now."""
        return self.store_dir.folder == folder and self.store_dir.is_current()

    def record_damage(self, what: str, user: tuple[int, int]) -> None:
        """Record a damaged item, and warn once."""
        head = self.store.counters.head
        is_known = bool(head[DAMAGED])
        head[DAMAGED] = 1  # the next process that has the store for itself rebuilds it
        self.store.counters.add(user, damaged=1)
        if not is_known:
            warn(
                f"the cache in {self.store_dir.folder} is damaged: {what}. Damaged examples are "
                "read from the source, and the cache is rebuilt when no process uses it",
                CacheWarning,
            )

    def close(self) -> None:
        """Write the queued items, close the store and leave the folder."""
        self.is_alive = False
        self.writer.close(_CLOSE_S)
        self.store.close()
        self.store_dir.leave()

    def before_fork(self) -> None:
        self.writer.before_fork()
        self.store.before_fork()

    def after_fork(self) -> None:
        self.store.after_fork()
        self.writer.after_fork()

    def drop(self) -> None:
        """Close inherited files in a forked child, without ending the parent's use."""
        self.is_alive = False
        self.store.drop()
        self.store_dir.drop()

    def _correct_counts(self, refused: list[StoredItem]) -> None:
        """Correct the counts, in which all queued items are admitted."""
        for user, count in Counter(item.user for item in refused).items():
            size = sum(item.size_bytes for item in refused if item.user == user)
            self.store.counters.add(
                user,
                admitted=-count,
                admitted_bytes=-size,
                refused=count,
                refused_bytes=size,
            )

    def _warn_failed(self, error: OSError) -> None:
        folder = self.store_dir.folder
        free = format_bytes(shutil.disk_usage(self.store_dir.inside).free)
        warn(  # LMDB calls a full disk an input/output error
            f"the cache in {folder} stores no more examples: {error} (its disk has {free} free). "
            "The examples in it are still used",
            CacheWarning,
        )


class Handles:
    """The handles of this process, one of each folder. A forked child starts with none."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._open: list[Handle] = []
        self._pid = 0
        self._closed = False
        self._interrupts = Deferred()  # an exception in a fork hook would be lost
        self._forking = 0  # the thread that forks, and holds the locks
        self._released_in_fork: list[Handle] = []  # by that thread, meanwhile

    def get(self, folder: str, join: Callable[[], StoreDir | None]) -> Handle | None:
        """Return the handle of a folder, opened with ``join`` if there is none; None if no room.

        The caller holds the lock, and must release the handle later.
        """
        if self._closed:
            return None
        handle = next((one for one in self._open if one.is_of(folder)), None)
        if handle is None:
            store_dir = join()
            if store_dir is None:
                return None
            try:
                handle = Handle(store_dir)
            except BaseException:
                store_dir.leave()
                raise
            self._open.append(handle)
            self._close_with_process()
        handle.uses += 1
        return handle

    def release(self, handle: Handle) -> None:
        """Release a handle; the last user closes it."""
        with defer_interrupts(again_soon):
            if not handle.is_alive:
                return
            if self._forking == threading.get_ident():
                # The garbage collector runs in a fork hook. Closing a store needs the held locks.
                self._released_in_fork.append(handle)
                return
            with self.lock:
                handle.uses -= 1
                if handle.uses:
                    return
                if handle in self._open:
                    self._open.remove(handle)
            # The garbage collector may have freed the last cache in the writer's own thread, which
            # cannot join itself.
            if handle.writer.is_here:
                start_thread("stoker-closing", handle.close)
            else:
                handle.close()

    def _close_with_process(self) -> None:
        """Close all handles at the end of a worker process, which runs no ``atexit``."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            # After the clients of other nodes (priority 20), whose last items still enter.
            close_with_worker(self.close_all, priority=10)

    def close_all(self) -> None:
        """Close all handles for good: the process is about to end without running finalizers.

        Threads that continue find no cache any more.
        """
        with self.lock:
            self._closed = True
            handles, self._open = self._open, []
        for handle in handles:
            handle.close()

    def before_fork(self) -> None:
        """Close all environments: LMDB allows none across a fork."""
        self._interrupts.begin()
        self.lock.acquire()
        self._forking = threading.get_ident()
        for handle in self._open:
            handle.before_fork()

    def after_fork(self) -> None:
        if (
            self._forking != threading.get_ident()
        ):  # Ctrl-C came before `before_fork` took the locks
            return
        for handle in self._open:
            handle.after_fork()
        self._forking = 0
        released, self._released_in_fork = self._released_in_fork, []
        self.lock.release()
        for handle in released:
            self.release(handle)
        if self._interrupts.end():
            again_soon()

    def in_child(self) -> None:
        for handle in self._open:
            handle.drop()
        self._open, self._released_in_fork = [], []
        self._closed = False
        self.lock = threading.RLock()
        self._forking = 0
        self._interrupts.end()


def close_with_worker(close: Callable[[], None], *, priority: int = 20) -> None:
    """Call ``close`` when this process ends, if it is a worker: workers run no ``atexit``.

    Higher priorities are closed first.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, close, exitpriority=priority)


HANDLES = Handles()
os.register_at_fork(
    before=HANDLES.before_fork,
    after_in_parent=HANDLES.after_fork,
    after_in_child=HANDLES.in_child,
)
