"""The order of a mixture: its parts, each in an order of its own that goes on from epoch to epoch.

A part's own epochs follow each other, each in an order of its own. An epoch of the mixture goes on
in a part where the last one ended.

A place of a mixture encodes a part and a number in it, counted from 0 over the examples of that
part in this epoch of the mixture. So an example's random draws depend neither on earlier examples
nor on its rank. A deal decides which part is next (``PartSharding``, ``PartwiseSharding``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.numbering import Numbering
from stoker.schedule.orders.order import Order, Places, as_array

# Of each part, whose orders are remembered: a batch may lie across the end of one.
_EPOCHS = 2


def part_bits(parts: int) -> int:
    """Return the number of a place's last bits that encode the part, of so many parts."""
    return (parts - 1).bit_length()


def interleave_places(
    parts: NDArray[np.int64], numbers: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Return the places for numbers in parts, of ``count`` parts."""
    return (numbers << part_bits(count)) + parts


def parts_and_numbers(
    places: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the parts that places stand for, of ``count``, and the numbers in them."""
    bits = part_bits(count)
    return places & ((1 << bits) - 1), places >> bits


class MixedOrder:
    """An order over parts whose numbers follow one another.

    Args:
        make: for each part, makes the order of one of its epochs.
        lengths: of the parts' sources.
        sizes: how many examples an epoch of each part has.
        begun: how many were drawn of each part before this epoch.
        drawn: how many are drawn of each in this epoch, over all ranks.

    Attributes:
        sizes, begun, drawn: as given.
    """

    together = 0  # dealt many at a time

    def __init__(
        self,
        make: Sequence[Callable[[int], Order]],
        lengths: Sequence[int],
        sizes: Sequence[int],
        begun: Sequence[int],
        drawn: Sequence[int],
    ) -> None:
        self.sizes, self.begun, self.drawn = sizes, begun, drawn
        self._count = sum(drawn)
        self._firsts = Numbering(lengths).starts.tolist()
        self._kind = np.min_scalar_type(len(lengths))
        self._orders = [functools.lru_cache(_EPOCHS)(each) for each in make]

    def __len__(self) -> int:
        return self._count

    def at(self, places: Places) -> NDArray[np.int64]:
        parts, numbers = parts_and_numbers(as_array(places), len(self._firsts))
        # In linear time, of numbers so small; the places of a part stay in their order.
        by_part = parts.astype(self._kind).argsort(kind="stable")
        numbers, start = numbers[by_part], 0
        found = np.empty(len(parts), np.int64)
        counts = np.bincount(parts, minlength=len(self._firsts)).tolist()
        for part, count in enumerate(counts):
            if count:
                stop = start + count
                drawn = self._find_draws(part, numbers[start:stop] + self.begun[part])
                found[by_part[start:stop]] = drawn + self._firsts[part]
                start = stop
        return found

    def _find_draws(self, part: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the examples of a part's draws, which are counted over all its epochs."""
        size = self.sizes[part]
        first, last = int(draws.min()) // size, int(draws.max()) // size
        if first == last:
            return self._orders[part](first).at(draws - first * size)
        epochs, places = np.divmod(draws, size)
        found = np.empty(len(draws), np.int64)
        for epoch in np.unique(epochs).tolist():
            its = epochs == epoch
            found[its] = self._orders[part](epoch).at(places[its])
        return found
