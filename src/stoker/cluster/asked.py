"""What a process has asked the other members for, until all of it is known."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stoker.cluster.line import Record
from stoker.one_shot import OneShot

PATIENCE_S = 5.0
"""After which what was asked for is read from storage, whatever becomes of the answer."""


class Found(NamedTuple):
    """An item that a member had."""

    record: Record
    member: str
    """Its name."""


class Asked:
    """Items that were asked for together.

    Args:
        keys: of them.
        on_missing: is told, by another thread, which ones nobody has, before that is known here.
    """

    def __init__(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> None:
        self._left = len(set(keys))
        self._on_missing = on_missing
        self._found: dict[bytes, Found] = {}
        self._lock = threading.Lock()
        self._done: OneShot[None] = OneShot()
        if not self._left:
            self._done.give()

    def wait(self) -> dict[bytes, Found]:
        """Return what was found, by key, when all is known, or after ``PATIENCE_S``."""
        with contextlib.suppress(TimeoutError):
            self._done.wait(PATIENCE_S)
        with self._lock:
            return dict(self._found)

    def give(self, found: Sequence[Found]) -> None:
        """Take what was found."""
        with self._lock:
            self._found.update((each.record.key, each) for each in found)
        self._count(len(found))

    def miss(self, keys: list[bytes]) -> None:
        """Take note of what was not."""
        if keys and self._on_missing is not None:
            self._on_missing(keys)
        self._count(len(keys))

    def _count(self, known: int) -> None:
        if not known:
            return
        with self._lock:
            self._left -= known
            is_done = not self._left
        if is_done:
            self._done.give()
