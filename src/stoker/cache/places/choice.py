"""Chooses for each example whether it is kept, and at which place, while a store fills.

The price of a byte (``model``) follows from the free room and from the examples that are not in the
store. There are two kinds of these. Some have not come yet: they are like all that came. The others
came and were refused: they are worth less for their bytes. With one place, this is
``admit="worth"``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from stoker.cache.places.model import NOWHERE, Price, places_of, price_of

# Recent examples whose worth is kept: enough to estimate the distribution, few enough to sort every
# 64 examples. Chosen, not measured.
_MAX_SEEN = 1024
# Examples that must be seen before the first choice: fewer do not show the distribution. Each
# process begins anew, so there are few of these, and none when few examples are left. Chosen, not
# measured.
_MIN_SEEN = 8

Forms = tuple[list[float], list[float]]
"""An example's forms: the nanoseconds that each saves, and the bytes that each takes."""


class Room(NamedTuple):
    """The state of a store that fills."""

    free_bytes: float
    left: int
    """Examples of an epoch that are not in the store."""
    unseen: int
    """Of these, the ones that no process has offered yet."""

    @classmethod
    def of(cls, free_bytes: float, left: int, admitted: int, missed: int) -> Room:
        """Return the room of a store.

        Args:
            free_bytes: its free room.
            left: the examples of an epoch that are not in the store.
            admitted, missed: how many examples it has taken, and how many have come.
        """
        # In the first epoch each comes once; later ones bring those again that were refused.
        return cls(free_bytes, left, min(left, max(0, left + admitted - missed)))


class PlaceChoice:
    """Chooses the forms that save most time for their bytes. Any thread may use it.

    Args:
        sample: forms that were measured before, of examples like those that come.
    """

    def __init__(self, sample: Sequence[Forms] = ()) -> None:
        # The forms of recent examples by their names, and whether they were refused.
        self._seen: dict[Hashable, tuple[Forms, bool]] = {
            (PlaceChoice, number): (forms, False) for number, forms in enumerate(sample)
        }
        self._lock = threading.Lock()
        self._price: Price | None = None
        # Examples that are to take a step of just the price's density, less those that took it.
        self._owed = 0.0
        self._since = self._due = 0  # examples since the last price, and until the next one

    def choose(
        self,
        name: Hashable,
        saved_ns: Sequence[float],
        sizes: Sequence[float],
        room: Callable[[], Room],
    ) -> int:
        """Return the place at which an example is kept; ``NOWHERE`` for the first few, too.

        Args:
            name: identifies the example, in all epochs.
            saved_ns: the time that its form at each place saves.
            sizes: the bytes that each form takes in the store.
            room: returns the state of the store.
        """
        with self._lock:
            forms = list(saved_ns), list(sizes)
            self._seen.pop(name, None)  # the latest come last
            self._seen[name] = forms, True
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            self._since += 1
            seen = len(self._seen)
            if seen < _MIN_SEEN and seen < room().left // _MIN_SEEN:
                return NOWHERE
            if self._price is None or self._since >= self._due:
                now = room()
                self._price = self._price_in(now)
                # The fewer are left, the less is made up for later.
                self._since, self._due = 0, min(seen, now.left) // _MIN_SEEN
            place, larger = places_of(saved_ns, sizes, self._price.per_byte)
            if larger != place:  # examples that are equal come to this for the whole class
                self._owed += self._price.part
                if self._owed >= 1:
                    self._owed -= 1
                    place = larger
            self._seen[name] = forms, place == NOWHERE
            return place

    def _price_in(self, room: Room) -> Price:
        """Return the price of a byte: of the left examples, those worth more fill the room."""
        forms, refused = zip(*self._seen.values(), strict=True)
        times, sizes = (np.array(each, float) for each in zip(*forms, strict=True))
        again = np.array(refused, float)
        # How many of the left examples each of these stands for.
        counts = room.unseen / len(again) + (room.left - room.unseen) * again / again.sum()
        price = price_of(times * counts[:, None], sizes * counts[:, None], room.free_bytes)
        # Those that were refused have had their turn: the others share what is left for equals.
        part = price.part * room.left / (room.unseen or room.left)
        return price._replace(part=min(1.0, part))
