"""Which items enter a store that cannot hold all of them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

_SEEN = 4096  # items whose worth is remembered
_JUDGED = 64  # so many must have been seen before any is turned away


class Admission(Protocol):
    """Says which items may enter."""

    def admits(self, cost_ns: int, size_bytes: int, free_bytes: int, left: int) -> bool:
        """Tell whether an item may enter.

        Args:
            cost_ns: what it took to make it.
            size_bytes: what it takes in the store.
            free_bytes: what the store has left.
            left: how many items of an epoch are not in the store.
        """
        ...


class FirstCome:
    """Everything enters, until the store is full: right where all items are worth alike."""

    def admits(self, cost_ns: int, size_bytes: int, free_bytes: int, left: int) -> bool:
        """Admit."""
        return True


class Worth:
    """What saves most time per byte enters.

    Of the items seen lately, those of most worth that would fit together, were the ones not in the
    store like them, set the bar. So the bar falls as the store finds room, and rises as it fills.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_SEEN)
        self._lock = threading.Lock()
        self._bar = 0.0
        self._since = 0

    def admits(self, cost_ns: int, size_bytes: int, free_bytes: int, left: int) -> bool:
        """Admit what is above the bar; the first few to learn where it is are not admitted."""
        worth = cost_ns / max(1, size_bytes)
        with self._lock:
            self._seen.append((worth, size_bytes))
            self._since += 1
            if len(self._seen) < min(_JUDGED, left):
                return False
            if self._since >= min(_JUDGED, len(self._seen)) or not self._bar:
                self._bar = self._raised(free_bytes, left)
                self._since = 0
            return worth >= self._bar

    def _raised(self, free_bytes: int, left: int) -> float:
        """Return the worth above which the items that are left would fill the room that is left."""
        room = free_bytes * len(self._seen) / max(1, left)
        for worth, size in sorted(self._seen, reverse=True):
            room -= size
            if room < 0:
                return worth
        return 0.0
