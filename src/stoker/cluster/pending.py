"""Pending lookups at other members, until all answers are in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from stoker.basics.future import OneShot
from stoker.cluster.keeper.client import Record

PATIENCE_S = 5.0
"""After which an item is read from storage, even if its answer still comes: ten silent keepers'
worth of ``DEADLINE_S``."""


class Found(NamedTuple):
    """An item that a member sent."""

    record: Record
    member: str
    """Its name."""


class Known(NamedTuple):
    """The results of a lookup."""

    found: dict[bytes, Found]
    """By key."""
    late: frozenset[bytes]
    """Keys whose answers did not come in time."""


class PendingGet:
    """Items that were looked up together.

    Args:
        keys: their keys.
        on_missing: called by another thread with the keys that no member has, before ``wait``
            returns them.
    """

    def __init__(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> None:
        self._unknown = set(keys)
        self._on_missing = on_missing
        self._found: dict[bytes, Found] = {}
        self._lock = threading.Lock()
        self._done: OneShot[None] = OneShot()
        if not self._unknown:
            self._done.give()

    def wait(self) -> Known:
        """Return the results when all answers are in, or after ``PATIENCE_S``."""
        with contextlib.suppress(TimeoutError):
            self._done.wait(PATIENCE_S)
        with self._lock:
            return Known(dict(self._found), frozenset(self._unknown))

    def give(self, found: Sequence[Found]) -> None:
        """Note found items."""
        with self._lock:
            self._found.update((each.record.key, each) for each in found)
        self._know(each.record.key for each in found)

    def miss(self, keys: list[bytes]) -> None:
        """Note missing keys."""
        if keys and self._on_missing is not None:
            self._on_missing(keys)
        self._know(keys)

    def _know(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            was_open = bool(self._unknown)
            self._unknown.difference_update(keys)
            is_done = was_open and not self._unknown
        if is_done:
            self._done.give()
