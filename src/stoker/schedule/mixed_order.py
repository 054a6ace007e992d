"""The order of a mixture: which part is next, and which of its examples.

A part is drawn from on and on: its own epochs follow each other, each in an order of its own, and
an epoch of the mixture goes on in it where the one before ended. All of it follows from the number
of the mixture's epoch and an ordinal in it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.dealing import Order
from stoker.schedule.numbering import Numbering
from stoker.schedule.orders import Selection
from stoker.schedule.proportions import Proportions

# Places computed at once: enough that NumPy's cost a call is spread, few enough for 32 KB. Chosen,
# not measured.
_BLOCK = 1 << 12
# Remembered: readers ahead, and items that are made again, ask at other places. Chosen, not
# measured.
_BLOCKS = 4
# Of each part, whose orders are remembered: a batch may lie across the end of one.
_EPOCHS = 2


class MixedOrder:
    """An order over parts whose indices follow one another.

    Args:
        proportions: of the parts.
        selections: of each part, what its epoch has and in what order.
        lengths: of the parts' sources.
        seed: keys the orders of the parts, each with its number as the purpose.
        epoch: of the mixture.
        count: how many examples that has.

    Attributes:
        epoch_counts: how many examples an epoch of each part has.
        begun: how many were drawn of each part before this epoch.
    """

    def __init__(
        self,
        proportions: Proportions,
        selections: Sequence[Selection],
        lengths: Sequence[int],
        seed: int,
        epoch: int,
        count: int,
    ) -> None:
        self._made_of = proportions, selections, lengths, seed, epoch, count
        self._proportions, self._selections = proportions, selections
        self._lengths, self._seed, self._count = lengths, seed, count
        self._firsts = Numbering(lengths).starts
        self.epoch_counts = [
            selection.count(length) for selection, length in zip(selections, lengths, strict=True)
        ]
        self.begun = [epoch * drawn for drawn in proportions.counts(count)]
        self._blocks: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._orders: list[OrderedDict[int, Order]] = [OrderedDict() for _ in lengths]
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedOrder, self._made_of

    def __len__(self) -> int:
        return self._count

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        parts = [
            self._block(number)[max(start - number * _BLOCK, 0) : stop - number * _BLOCK]
            for number in range(start // _BLOCK, -(-stop // _BLOCK))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def index(self, ordinal: int) -> int:
        return int(self._block(ordinal // _BLOCK)[ordinal % _BLOCK])

    def counts(self, ordinals: int) -> list[int]:
        """Return how many of the first so many examples are of each part."""
        return self._proportions.counts(ordinals)

    def _block(self, number: int) -> NDArray[np.int64]:
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                start = number * _BLOCK
                block = self._indices(start, min(start + _BLOCK, self._count))
                _remember(self._blocks, number, block, _BLOCKS)
            return block

    def _indices(self, start: int, stop: int) -> NDArray[np.int64]:
        parts, numbers = self._proportions.parts(start, stop)
        indices = np.empty(stop - start, np.int64)
        for part, first in enumerate(self._firsts):
            mine = np.flatnonzero(parts == part)
            if len(mine):  # their numbers follow one another
                drawn = self.begun[part] + int(numbers[mine[0]])
                indices[mine] = first + self._drawn(part, drawn, drawn + len(mine))
        return indices

    def _drawn(self, part: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return what the draws of a part are, counted over all its epochs."""
        size = self.epoch_counts[part]
        epochs = range(start // size, (stop - 1) // size + 1)
        found = [
            self._order(part, epoch).span(
                max(start - epoch * size, 0), min(stop - epoch * size, size)
            )
            for epoch in epochs
        ]
        return np.concatenate(found)

    def _order(self, part: int, epoch: int) -> Order:
        known = self._orders[part]
        order = known.get(epoch)
        if order is None:
            selection, length = self._selections[part], self._lengths[part]
            order = selection.order(length, self._seed, epoch, purpose=part)
            _remember(known, epoch, order, _EPOCHS)
        return order


def _remember(known: OrderedDict[int, Any], key: int, value: Any, most: int) -> None:
    if len(known) == most:
        known.popitem(last=False)
    known[key] = value
