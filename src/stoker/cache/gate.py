"""A gate: a store is closed while its process forks, for LMDB allows none across a fork."""

from __future__ import annotations

import threading


class Gate:
    """Lets any number of threads in, or shuts all of them out.

    Every thread has a door of its own, a plain lock, since a count of those inside would go wrong:
    Ctrl-C may come between any two steps of Python code, while locks are taken and given back in
    one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doors: dict[int, threading.Lock] = {}

    def door(self) -> threading.Lock:
        """Return this thread's door; it is inside as long as it holds it."""
        me = threading.get_ident()
        door = self._doors.get(me)
        if door is None:
            with self._lock:
                door = self._doors[me] = threading.Lock()
        return door

    def shut(self) -> None:
        """Let nobody in any more, and wait until all are out."""
        self._lock.acquire()
        for door in self._doors.values():
            door.acquire()

    def open(self) -> None:
        """Let them in again."""
        for door in self._doors.values():
            door.release()
        self._lock.release()
