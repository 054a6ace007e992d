"""Lookups at other members that wait for their answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from stoker.basics.future import OneShot
from stoker.cluster.keeper.client import Record

PATIENCE_S = 5.0
"""How long a lookup waits for its answers; then missing items are read from storage. Ten times
``DEADLINE_S``, so ten keepers in turn may be silent. Chosen, not measured."""


class Found(NamedTuple):
    """An item that a member sent."""

    record: Record
    member: str
    """The member's name."""


class GetResult(NamedTuple):
    """The result of a lookup."""

    found: dict[bytes, Found]
    """The items that members sent, by key."""
    late: frozenset[bytes]
    """Keys for which no answer came in time."""


class PendingGet:
    """One lookup of several items at other members.

    Args:
        keys: the items' keys.
        on_missing: called by another thread with the keys that no member has, before ``wait``
            returns.
    """

    def __init__(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> None:
        self._open_keys = set(keys)
        self._on_missing = on_missing
        self._found: dict[bytes, Found] = {}
        self._lock = threading.Lock()
        self._done: OneShot[None] = OneShot()
        if not self._open_keys:
            self._done.give()

    def wait(self) -> GetResult:
        """Return the results when all answers are in, or after ``PATIENCE_S``."""
        with contextlib.suppress(TimeoutError):
            self._done.wait(PATIENCE_S)
        with self._lock:
            return GetResult(dict(self._found), frozenset(self._open_keys))

    def add_found(self, found: Sequence[Found]) -> None:
        """Record items that a member sent."""
        with self._lock:
            self._found.update((each.record.key, each) for each in found)
        self._resolve(each.record.key for each in found)

    def add_missing(self, keys: list[bytes]) -> None:
        """Record keys that no member has."""
        if keys and self._on_missing is not None:
            self._on_missing(keys)
        self._resolve(keys)

    def _resolve(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            was_open = bool(self._open_keys)
            self._open_keys.difference_update(keys)
            is_done = was_open and not self._open_keys
        if is_done:
            self._done.give()
