"""A gate: a store is closed while its process forks, for LMDB allows none across a fork."""

from __future__ import annotations

import threading


class Gate:
    """Lets any number of threads in, or shuts all of them out."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._shut = False

    def __enter__(self) -> None:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in any more, and wait until all are out."""
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._shut = True
            while self._inside:
                self._changed.wait()

    def open(self) -> None:
        """Let them in again."""
        with self._changed:
            self._shut = False
            self._changed.notify_all()
