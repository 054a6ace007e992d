"""State that was found to be shared, and the names that led to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MISSING: Any = object()
"""What a name stands for in a table that does not have it."""


class Findings:
    """Reasons, and the objects that they are about. Each thing is looked at once.

    What was found of it then counts for whatever else comes to it as well.
    """

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._touched: list[Any] = []
        self._by_key: dict[Any, tuple[list[str], list[Any]]] = {}
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []

    def take(self) -> tuple[list[str], list[Any]]:
        """Return the reasons, and the objects that copies would share, since the last call."""
        found = self._reasons, self._touched
        self._reasons, self._touched = [], []
        return found

    def add(self, reason: str, *touched: Any) -> None:
        """Add a reason, and the object that it is about, if there is one."""
        self._reasons.append(reason)
        self._touched += touched

    def once(self, key: Any, look: Callable[[], None]) -> None:
        """Have something looked at, if it was not yet."""
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
        """Return whether a look finds reasons, which are left out: the caller states its own."""
        reasons, self._reasons = self._reasons, []
        self.once(key, look)
        found, self._reasons = bool(self._reasons), reasons
        return found

    def note(self, space: Mapping[str, Any], name: str, value: Any) -> None:
        """Note that a name led to a value, or to ``MISSING``: as long as it does, findings hold."""
        self._names.append((space, name, value))

    def are_current(self) -> bool:
        """Return whether the names that were followed still mean the same objects."""
        return all(space.get(name, MISSING) is value for space, name, value in self._names)
