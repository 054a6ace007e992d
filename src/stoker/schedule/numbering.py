"""One numbering of parts that follow each other: files, shards, row groups, a mixture's parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Numbering:
    """Numbers the items of all parts from 0 on, part after part. Read-only; any thread may ask.

    A part may be empty. ``Numbering([2, 0, 3]).find(2)`` is ``(2, 0)``.

    Args:
        sizes: how many items each part has.

    Attributes:
        starts: the number of the first item of each part, ``int64 [parts]``; not to be written.
        ends: the number behind the last item of each part, alike.
        total: of all items.
    """

    def __init__(self, sizes: Sequence[int] | NDArray[np.integer]) -> None:
        bounds = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=bounds[1:])
        self.starts, self.ends = bounds[:-1], bounds[1:]  # one memory: there may be millions
        self.total = int(bounds[-1])
        self._each = _size_of_all(self.ends)

    def __reduce__(self) -> tuple[object, ...]:
        return Numbering, (self.ends - self.starts,)  # else both views would be pickled as arrays

    def find(self, number: int) -> tuple[int, int]:
        """Return the part of an item, and the item's number in it."""
        part = int(self.ends.searchsorted(number, "right"))
        return part, int(number - self.starts[part])

    def parts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the part of each item, in the shape of ``numbers``."""
        if self._each:
            return numbers // self._each  # a tenth of the time
        return self.ends.searchsorted(numbers, "right")

    def find_many(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the part of each item, and its number there; both in the shape of ``numbers``."""
        parts = self.parts(numbers)
        return parts, numbers - self.starts.take(parts)


def _size_of_all(ends: NDArray[np.int64]) -> int:
    """Return the size of each part, of which the last may be smaller; 0 where others differ."""
    if not len(ends) or not ends[0]:
        return 0
    each, last = int(ends[0]), len(ends) - 1
    regular = ends[last] > last * each and ends[last] <= (last + 1) * each
    if not regular or not np.array_equal(ends[:-1], np.arange(1, last + 1) * each):
        return 0
    return each
