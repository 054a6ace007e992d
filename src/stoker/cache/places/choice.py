"""Chooses for each example whether it is kept, and at which place, while a store fills.

The examples seen lately are a sample of those that are not in the store. The price of a byte
(``model``) follows from them and from the free room: it is low while there is much room for the
examples that are left, and rises or falls as the store fills, so that the room is used up when all
have come. With one place, this is ``admit="worth"``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from stoker.cache.places.model import NOWHERE, place_of, price_of

# Recent examples whose worth is kept: enough to estimate the distribution, few enough to sort every
# 64 examples. Chosen, not measured.
_MAX_SEEN = 1024
# Examples that must be seen before the first choice: fewer do not show the distribution. Each
# process begins anew, so there are few of these, and none when few examples are left. Chosen, not
# measured.
_MIN_SEEN = 8

Forms = tuple[list[float], list[float]]
"""An example's forms: the nanoseconds that each saves, and the bytes that each takes."""


class PlaceChoice:
    """Chooses the forms that save most time for their bytes. Any thread may use it.

    Args:
        sample: forms that were measured before, of examples like those that come.
    """

    def __init__(self, sample: Sequence[Forms] = ()) -> None:
        self._seen: deque[Forms] = deque(sample, maxlen=_MAX_SEEN)
        self._lock = threading.Lock()
        self._price: float | None = None
        self._since = 0

    def choose(
        self, saved_ns: Sequence[float], sizes: Sequence[float], free_bytes: float, left: int
    ) -> int:
        """Return the place at which an example is kept; ``NOWHERE`` for the first few, too.

        Args:
            saved_ns: the time that its form at each place saves.
            sizes: the bytes that each form takes in the store.
            free_bytes: the store's free room.
            left: the number of an epoch's examples that are not in the store.
        """
        with self._lock:
            self._seen.append((list(saved_ns), list(sizes)))
            self._since += 1
            seen = len(self._seen)
            if seen < min(_MIN_SEEN, left // _MIN_SEEN):
                return NOWHERE
            if self._price is None or self._since >= max(_MIN_SEEN, seen // _MIN_SEEN):
                times, rooms = (np.array(each, float) for each in zip(*self._seen, strict=True))
                self._price = price_of(times, rooms, free_bytes * seen / max(1, left))
                self._since = 0
            return place_of(saved_ns, sizes, self._price)
