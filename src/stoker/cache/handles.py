"""The stores that this process has open: one handle for all caches that name the same folder."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from stoker.cache.counters import DAMAGED, FULL, ITEMS, SHOWN_S, USED_BYTES
from stoker.cache.store import Added, Store
from stoker.cache.store_dir import StoreDir, in_memory
from stoker.cache.writer import Writer
from stoker.caution import warn
from stoker.errors import CacheError, CacheWarning
from stoker.machine import format_bytes
from stoker.signals import Deferred, again_soon, deferred

_CLOSE_S = 5.0
_TO_THE_END = -1


class Handle:
    """An open store, the thread that fills it, and the hold on its folder.

    Attributes:
        alive: False once it is closed, or in a process that inherited it.
    """

    def __init__(self, place: StoreDir) -> None:
        self.alive = True
        self.uses = 0
        self.place = place
        self._line_open = False
        self.store = Store(place.inside, place.about.limit_bytes, in_memory=in_memory(place.folder))
        self.writer = Writer(self.store, self._written, self._failed)

    def damaged(self, what: str, user: tuple[int, int], *, refuse: bool) -> None:
        """Note what is not as it was written. Raises CacheError where that is refused."""
        head = self.store.counters.head
        told = bool(head[DAMAGED])
        head[DAMAGED] = 1  # whoever is alone with it next makes it anew
        self.store.counters.add(user, damaged=1)
        folder = self.place.folder
        text = f"the cache in {folder} is damaged: {what}"
        if refuse:
            raise CacheError(f"{text}. Remove it: stoker cache remove {folder}")
        if not told:
            warn(
                f"{text}. It is read from the source instead, and the cache is made anew when "
                "nobody uses it any more",
                CacheWarning,
            )

    def close(self) -> None:
        """Write what waits, and let go of the folder."""
        self.alive = False
        self.writer.close(_CLOSE_S)
        self.store.close()
        self.place.leave()
        if self._line_open:
            with contextlib.suppress(ValueError, OSError, AttributeError):
                sys.stderr.write("\n")

    def before_fork(self) -> None:
        """Close what must not cross a fork."""
        self.writer.before_fork()
        self.store.before_fork()

    def after_fork(self) -> None:
        """Go on, in the parent."""
        self.store.after_fork()
        self.writer.after_fork()

    def drop(self) -> None:
        """In a child: leave the parent's hold alone."""
        self.alive = False
        self.store.drop()
        self.place.drop()

    def _written(self, added: Added) -> None:
        """Correct the counts, which took everything for admitted, and show how far it is."""
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
                self._show()

    def _show(self) -> None:
        head = self.store.counters.head
        now = int(time.time())
        if head[SHOWN_S] == _TO_THE_END or (head[SHOWN_S] == now and not head[FULL]):
            return  # some process has shown it
        head[SHOWN_S] = _TO_THE_END if head[FULL] else now
        self._line_open = not head[FULL]
        used, limit = format_bytes(int(head[USED_BYTES])), format_bytes(self.store.limit_bytes)
        end = ", full\n" if head[FULL] else ""
        sys.stderr.write(f"\r\x1b[Kcache: {used} of {limit}, {int(head[ITEMS]):,} items{end}")
        sys.stderr.flush()

    def _failed(self, error: OSError) -> None:
        warn(
            f"the cache in {self.place.folder} admits nothing more: {error}. What is in it stays "
            "in use",
            CacheWarning,
        )


class Handles:
    """The handles of this process, by folder. In a forked child there are none at first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._open: dict[str, Handle] = {}
        self._pid = 0
        self._closed = False
        self._interrupts = Deferred()  # what is raised in a hook of a fork is lost
        self._forking = 0  # the thread that holds everything still

    def get(self, folder: str, join: Callable[[], StoreDir | None]) -> Handle | None:
        """Return a handle, opened by ``join`` if there is none; None if that has no place for it.

        Called under the lock. Each one must be released.
        """
        if self._closed:
            return None
        handle = self._open.get(folder)
        if handle is None:
            place = join()
            if place is None:
                return None
            try:
                handle = Handle(place)
            except BaseException:
                place.leave()
                raise
            self._open[folder] = handle
            self._close_with_process()
        handle.uses += 1
        return handle

    def release(self, handle: Handle) -> None:
        """Give a handle back; the last one closes it."""
        with deferred(again_soon):
            if not handle.alive:
                return
            with self.lock:
                handle.uses -= 1
                if handle.uses:
                    return
                self._open.pop(handle.place.folder, None)
            if handle.writer.is_here:  # the collector found the last cache in there
                threading.Thread(target=handle.close, name="stoker-closing", daemon=True).start()
            else:
                handle.close()

    def _close_with_process(self) -> None:
        """Have all of it closed with a worker process, which runs no ``atexit``."""
        multiprocessing = sys.modules.get("multiprocessing")
        if multiprocessing is None or multiprocessing.parent_process() is None:
            return
        if self._pid != os.getpid():
            from multiprocessing.util import Finalize

            self._pid = os.getpid()
            Finalize(None, self.close_all, exitpriority=10)

    def close_all(self) -> None:
        """Close all, for good: the process is about to end without running finalizers.

        Threads that go on find no cache any more.
        """
        with self.lock:
            self._closed = True
            handles, self._open = list(self._open.values()), {}
        for handle in handles:
            handle.close()

    def before_fork(self) -> None:
        """Hold still."""
        self._interrupts.begin()
        self.lock.acquire()
        self._forking = threading.get_ident()
        for handle in self._open.values():
            handle.before_fork()

    def after_fork(self) -> None:
        """Go on, in the parent."""
        if self._forking != threading.get_ident():  # Ctrl-C came first: nothing is held
            return
        for handle in self._open.values():
            handle.after_fork()
        self._forking = 0
        self.lock.release()
        if self._interrupts.end():
            again_soon()

    def in_child(self) -> None:
        """Begin anew."""
        for handle in self._open.values():
            handle.drop()
        self._open = {}
        self._closed = False
        self.lock = threading.RLock()
        self._forking = 0
        self._interrupts.end()


HANDLES = Handles()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=HANDLES.before_fork,
        after_in_parent=HANDLES.after_fork,
        after_in_child=HANDLES.in_child,
    )
