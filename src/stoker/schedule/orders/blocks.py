"""Shuffling by blocks, for examples that are cheap to read only beside their neighbours.

Blocks (a shard, a row group, a run of neighbours) come in random order. Each is cut into
``WINDOW`` slices of neighbours, beginning anywhere in it. The epoch is a row of windows: window
``t`` has the first slice of block ``t``, the second of the block before it, and so on, shuffled.
So a window draws from ``WINDOW`` blocks, the next one from all of these but one, and each block is
read through in ``WINDOW`` windows that follow one another. It wraps around: blocks of the end also
stand in the first windows.

It is a permutation, and any place of it follows from the key. It takes 32 bytes a block.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.schedule import rng
from stoker.schedule.numbering import Numbering
from stoker.schedule.orders.order import Places, as_array

WINDOW = 16
"""Blocks in a window. More of them mix better, but a reader has to hold as many.
Chosen, not measured."""
LARGEST = 1 << 20
"""Examples in a block; larger ones are split, so that a window has at most as many
indices, 8 MB."""
# Windows: a batch may lie across two that follow each other.
_REMEMBERED = 2


class BlockOrder:
    """A permutation by blocks.

    Args:
        ends: of each block, the number behind its last example; ascending, of none twice.
        key: keys the permutation.
    """

    together = 0

    def __init__(self, ends: NDArray[np.int64], key: NDArray[np.uint64]) -> None:
        self._key, self._count = key, int(ends[-1])
        sizes = np.diff(ends, prepend=0)
        generator = np.random.Generator(np.random.Philox(key=key))
        blocks = generator.permutation(len(ends))
        self._starts, self._sizes = (ends - sizes)[blocks], sizes[blocks]
        self._turns = generator.integers(0, self._sizes)  # where the first slice begins
        windows = np.zeros(len(ends), np.int64)
        for number in range(WINDOW):
            windows += np.roll(_cut(self._sizes, number + 1) - _cut(self._sizes, number), number)
        self._numbering = Numbering(windows)
        self._random = rng.AddressedGenerator()
        self._window = functools.lru_cache(_REMEMBERED)(self._make_window)

    def __len__(self) -> int:
        return self._count

    def at(self, places: Places) -> NDArray[np.int64]:
        if not len(places):
            return np.empty(0, np.int64)
        if not isinstance(places, range) or places.step != 1:
            return self._at(as_array(places))
        low, high = places.start, places.stop
        first, last = self._numbering.parts(np.array([low, high - 1])).tolist()
        parts = []
        for number in range(first, last + 1):
            window, begins = self._window(number), int(self._numbering.starts[number])
            parts.append(window[max(low - begins, 0) : high - begins])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        windows, within = self._numbering.find_many(places)
        found = np.empty(len(places), np.int64)
        for number in np.unique(windows).tolist():
            mine = windows == number
            found[mine] = self._window(number)[within[mine]]
        return found

    def _make_window(self, number: int) -> NDArray[np.int64]:
        # Counters from 1 on: the order of the blocks was drawn from 0.
        generator = self._random.at(self._key, number + 1)
        window: NDArray[np.int64] = generator.permutation(self._slices(number))
        return window

    def _slices(self, number: int) -> NDArray[np.int64]:
        """Return the indices of a window as they lie in their blocks."""
        slices = np.arange(WINDOW)
        blocks = (number - slices) % len(self._sizes)
        sizes = self._sizes[blocks]
        low = _cut(sizes, slices)
        lengths = _cut(sizes, slices + 1) - low
        firsts, ends = (self._turns[blocks] + low) % sizes, np.cumsum(lengths)
        indices: NDArray[np.int64] = np.arange(ends[-1])
        indices += np.repeat(self._starts[blocks] + firsts - (ends - lengths), lengths)
        beyond = firsts + lengths - sizes
        for at in np.flatnonzero(beyond > 0).tolist():  # from the block's beginning on
            indices[ends[at] - beyond[at] : ends[at]] -= sizes[at]
        return indices


def runs(length: int, size: int) -> NDArray[np.int64]:
    """Return the ends of blocks of ``size`` neighbours; the last one may have fewer."""
    return np.minimum(np.arange(size, length + size, size, dtype=np.int64), length)


def cut_to(ends: NDArray[np.int64], first: int, length: int) -> NDArray[np.int64]:
    """Return the ends of blocks cut to examples ``first .. first + length - 1``, from 0 on."""
    cut = np.clip(ends - first, 0, length)
    return cut[np.diff(cut, prepend=0) > 0]


def not_too_large(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ends of blocks, split so that a window can be shuffled in memory."""
    sizes = np.diff(ends, prepend=0)
    pieces = -(-sizes // LARGEST)
    if not len(ends) or pieces.max() <= 1:
        return ends
    of = np.repeat(np.arange(len(ends)), pieces)
    number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + 1
    cut: NDArray[np.int64] = (ends - sizes)[of] + sizes[of] * number // pieces[of]
    return cut


def _cut(sizes: Any, number: Any) -> Any:
    """Return the start of a slice in blocks of these sizes."""
    return sizes * number // WINDOW
