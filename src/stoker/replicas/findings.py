"""Keeps the shared state that was found, and the names that led to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MISSING: Any = object()
"""The value of a name that its table does not have."""


class Findings:
    """Reasons and their objects. Each class or function is examined once, for all its users."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._touched: list[Any] = []
        self._by_key: dict[Any, tuple[list[str], list[Any]]] = {}
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []

    def take(self) -> tuple[list[str], list[Any]]:
        """Return the reasons since the last call, and the objects that copies would share."""
        found = self._reasons, self._touched
        self._reasons, self._touched = [], []
        return found

    def add(self, reason: str, *touched: Any) -> None:
        """Add a reason, and the object of which it speaks, if any."""
        self._reasons.append(reason)
        self._touched += touched

    def once(self, key: Any, look: Callable[[], None]) -> None:
        """Call ``look`` if it was not called for this key yet."""
        found = self._by_key.get(key)
        if found is None:
            before = self._reasons, self._touched
            self._reasons, self._touched = found = self._by_key[key] = [], []
            look()
            self._reasons, self._touched = before
        self._reasons += [each for each in found[0] if each not in self._reasons]
        known = {*map(id, self._touched)}
        self._touched += [each for each in found[1] if id(each) not in known]

    def is_reason(self, key: Any, look: Callable[[], None]) -> bool:
        """True if ``look`` adds reasons. They are dropped: the caller states its own."""
        reasons, self._reasons = self._reasons, []
        self.once(key, look)
        found, self._reasons = bool(self._reasons), reasons
        return found

    def note(self, space: Mapping[str, Any], name: str, value: Any) -> None:
        """Note the value of a name, or ``MISSING``. Findings hold until a noted value changes."""
        self._names.append((space, name, value))

    def are_current(self) -> bool:
        """True if all noted names still have the same values."""
        return all(space.get(name, MISSING) is value for space, name, value in self._names)
