"""The protocol of an order: it maps the places of an epoch to numbers of the source.

A place is the number of a fresh example in the epoch over all ranks: 0, 1, 2, ... It is the address
of all random draws for that example. (In a mixture it stands for a part, and a number in the part:
``orders.mixed``.) An order is the same on every rank and knows no batches; which places are a
rank's is decided by a deal (``schedule.dealing``).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Places = range | NDArray[np.int64]
"""Places, or rows of a rank: a range costs nothing, however long."""


class Order(Protocol):
    """Maps places to numbers of the source. Safe to use from any thread.

    Attributes:
        together: how many places should be asked for at once, so that a call's own cost does not
            count; 0 where any number will do.
    """

    together: int

    def __len__(self) -> int:
        """Return how many places there are."""
        ...

    def at(self, places: Places) -> NDArray[np.int64]:
        """Return the numbers of the examples at these places, ``int64``; possibly a view."""
        ...


def as_array(places: Places) -> NDArray[np.int64]:
    """Return places as an array, ``int64``."""
    if isinstance(places, range):  # NumPy would go through it number by number
        return np.arange(places.start, places.stop, places.step, dtype=np.int64)
    return places


def offset_places(places: Places, by: int) -> Places:
    """Return places with a number added to each."""
    if isinstance(places, range):
        return range(places.start + by, places.stop + by, places.step)
    return places + by
