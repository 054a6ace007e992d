"""Open stores of this process: one handle for all caches with the same folder.

There is one handle, because a process that closes a file loses all its locks on it (``lockf``),
also those that were taken through another descriptor: the rows of ``counters`` are locked so by
their writers. And LMDB allows no two environments of one folder in a process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from stoker.basics.resources import format_bytes
from stoker.basics.signals import Deferred, again_soon, deferred
from stoker.basics.warn import warn
from stoker.cache.counters import DAMAGED, FULL, ITEMS, SHOWN_S, USED_BYTES
from stoker.cache.location import is_in_memory
from stoker.cache.store import Added, Store
from stoker.cache.store_dir import StoreDir
from stoker.cache.writer import Writer
from stoker.errors import CacheError, CacheWarning

# As long as a process may take longer to end for the sake of its last items.
_CLOSE_S = 5.0
# Lines stay in a log: a store that fills for an hour writes 720.
_SHOW_EVERY_S = 5
# In place of a time, which is never negative.
_SHOWN_FULL = -1


class Handle:
    """An open store, the thread that fills it, and the hold on its folder.

    Attributes:
        is_alive: False once it is closed, and in a process that inherited it.
    """

    def __init__(self, store_dir: StoreDir) -> None:
        self.is_alive = True
        self.uses = 0
        self.store_dir = store_dir
        in_memory = is_in_memory(store_dir.folder)
        self.store = Store(store_dir.inside, store_dir.about.limit_bytes, in_memory=in_memory)
        self.writer = Writer(self.store, self._correct_counts, self._warn_failed)

    def note_damage(self, what: str, user: tuple[int, int], *, refuse: bool) -> None:
        """Note a damaged item. Raises CacheError where ``refuse``."""
        head = self.store.counters.head
        is_known = bool(head[DAMAGED])
        head[DAMAGED] = 1  # the next user that is alone with it makes it anew
        self.store.counters.add(user, damaged=1)
        folder = self.store_dir.folder
        text = f"the cache in {folder} is damaged: {what}"
        if refuse:
            raise CacheError(f"{text}. Remove it: stoker cache remove {folder}")
        if not is_known:
            warn(
                f"{text}. It is read from the source instead, and the cache is made anew when "
                "nobody uses it any more",
                CacheWarning,
            )

    def close(self) -> None:
        """Write the waiting items, and leave the folder."""
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
        """In a child: leave the parent's hold alone."""
        self.is_alive = False
        self.store.drop()
        self.store_dir.drop()

    def _correct_counts(self, added: Added) -> None:
        """Correct the counts, which took all queued items for admitted, and show the progress."""
        for user, count in Counter(item.user for item in added.refused).items():
            size = sum(item.size_bytes for item in added.refused if item.user == user)
            self.store.counters.add(
                user,
                admitted=-count,
                admitted_bytes=-size,
                refused=count,
                refused_bytes=size,
            )
        with contextlib.suppress(ValueError, OSError, AttributeError):  # no stderr, or a closed one
            if sys.stderr.isatty():
                self._show_progress()

    def _show_progress(self) -> None:
        """Print a line every few seconds, and one when the store is full; one process prints."""
        head = self.store.counters.head
        now, is_full = int(time.time()), bool(head[FULL])
        shown_s = int(head[SHOWN_S])
        if shown_s == _SHOWN_FULL or (not is_full and now - shown_s < _SHOW_EVERY_S):
            return
        head[SHOWN_S] = _SHOWN_FULL if is_full else now
        if not shown_s and not is_full:
            return  # it has just begun
        used, limit = format_bytes(int(head[USED_BYTES])), format_bytes(self.store.limit_bytes)
        end = ", full" if is_full else ""
        sys.stderr.write(f"cache: {used} of {limit}, {int(head[ITEMS]):,} items{end}\n")
        sys.stderr.flush()

    def _warn_failed(self, error: OSError) -> None:
        warn(
            f"the cache in {self.store_dir.folder} admits nothing more: {error}. What is in it "
            "stays in use",
            CacheWarning,
        )


class Handles:
    """The handles of this process, by folder. A forked child begins with none."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._open: dict[str, Handle] = {}
        self._pid = 0
        self._closed = False
        self._interrupts = Deferred()  # what is raised in a hook of a fork is lost
        self._forking = 0  # the thread that holds everything still
        self._given_back: list[Handle] = []  # by it, meanwhile

    def get(self, folder: str, join: Callable[[], StoreDir | None]) -> Handle | None:
        """Return a handle, opened by ``join`` if there is none; None if there is no room.

        Called under the lock. Each one must be released.
        """
        if self._closed:
            return None
        handle = self._open.get(folder)
        if handle is None:
            store_dir = join()
            if store_dir is None:
                return None
            try:
                handle = Handle(store_dir)
            except BaseException:
                store_dir.leave()
                raise
            self._open[folder] = handle
            self._close_with_process()
        handle.uses += 1
        return handle

    def release(self, handle: Handle) -> None:
        """Give a handle back; its last user closes it."""
        with deferred(again_soon):
            if not handle.is_alive:
                return
            if self._forking == threading.get_ident():
                # The collector ran in a hook of the fork. To close a store takes what is held.
                self._given_back.append(handle)
                return
            with self.lock:
                handle.uses -= 1
                if handle.uses:
                    return
                self._open.pop(handle.store_dir.folder, None)
            if handle.writer.is_here:  # the collector found the last cache in there
                threading.Thread(target=handle.close, name="stoker-closing", daemon=True).start()
            else:
                handle.close()

    def _close_with_process(self) -> None:
        """Close all handles at the end of a worker process, which runs no ``atexit``."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            # Behind what feeds the cache (20, the default), whose last items it still takes.
            close_with_worker(self.close_all, priority=10)

    def close_all(self) -> None:
        """Close all, for good: the process is about to end without running finalizers.

        Threads that continue find no cache any more.
        """
        with self.lock:
            self._closed = True
            handles, self._open = list(self._open.values()), {}
        for handle in handles:
            handle.close()

    def before_fork(self) -> None:
        """Close all environments: LMDB allows none across a fork."""
        self._interrupts.begin()
        self.lock.acquire()
        self._forking = threading.get_ident()
        for handle in self._open.values():
            handle.before_fork()

    def after_fork(self) -> None:
        if self._forking != threading.get_ident():  # Ctrl-C came first: nothing is held
            return
        for handle in self._open.values():
            handle.after_fork()
        self._forking = 0
        given_back, self._given_back = self._given_back, []
        self.lock.release()
        for handle in given_back:
            self.release(handle)
        if self._interrupts.end():
            again_soon()

    def in_child(self) -> None:
        for handle in self._open.values():
            handle.drop()
        self._open, self._given_back = {}, []
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
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=HANDLES.before_fork,
        after_in_parent=HANDLES.after_fork,
        after_in_child=HANDLES.in_child,
    )
