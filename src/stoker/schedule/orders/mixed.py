"""The order of a mixture: its parts, each in an order of its own that goes on from epoch to epoch.

A part is drawn from on and on: its own epochs follow each other, each in an order of its own, and
an epoch of the mixture goes on in it where the one before ended.

A place of a mixture stands for a part and a number in it: example ``n`` that an epoch of the
mixture has of part ``p`` is at place ``n * parts + p``. So what is drawn for it depends neither on
what comes before it nor on the rank that has it. Which part is next is decided by a deal
(``PartDeal``, ``InStepDeal``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.numbering import Numbering
from stoker.schedule.orders.order import Order, Places, as_array

# Of each part, whose orders are remembered: a batch may lie across the end of one.
_EPOCHS = 2


def parts_at(places: Sequence[int], parts: int) -> list[int]:
    """Return which part is at each place of a mixture of so many, from 0 on."""
    return [place % parts for place in places]


class MixedOrder:
    """An order over parts whose numbers follow one another.

    Args:
        make: for each part, makes the order of one of its epochs.
        lengths: of the parts' sources.
        sizes: how many examples an epoch of each part has.
        begun: how many were drawn of each part before this epoch.
        count: how many examples the epoch has, over all ranks.

    Attributes:
        sizes, begun: as given.
    """

    together = 0  # dealt many at a time

    def __init__(
        self,
        make: Sequence[Callable[[int], Order]],
        lengths: Sequence[int],
        sizes: Sequence[int],
        begun: Sequence[int],
        count: int,
    ) -> None:
        self._make, self.sizes, self.begun, self._count = make, sizes, begun, count
        self._firsts = Numbering(lengths).starts
        self._orders: list[OrderedDict[int, Order]] = [OrderedDict() for _ in lengths]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def at(self, places: Places) -> NDArray[np.int64]:
        numbers, parts = np.divmod(as_array(places), len(self._firsts))
        found = np.empty(len(parts), np.int64)
        with self._lock:
            for part, first in enumerate(self._firsts):
                mine = np.flatnonzero(parts == part)
                if len(mine):
                    found[mine] = first + self._drawn(part, self.begun[part] + numbers[mine])
        return found

    def _drawn(self, part: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what the draws of a part are, counted over all its epochs."""
        epochs, places = np.divmod(draws, self.sizes[part])
        first, last = int(epochs.min()), int(epochs.max())
        if first == last:
            return self._order(part, first).at(places)
        found = np.empty(len(draws), np.int64)
        for epoch in np.unique(epochs).tolist():
            its = epochs == epoch
            found[its] = self._order(part, epoch).at(places[its])
        return found

    def _order(self, part: int, epoch: int) -> Order:
        known = self._orders[part]
        order = known.get(epoch)
        if order is None:
            order = self._make[part](epoch)
            if len(known) == _EPOCHS:
                known.popitem(last=False)
            known[epoch] = order
        return order
