"""Orders by weight: how often an example comes follows its weight.

Draws are by systematic sampling: the weights lie side by side on a line, and equidistant
points on it, from a random beginning, are the examples of the epoch. So each comes as often as its
share of the epoch says, rounded down or up, in every epoch. A permutation mixes the points.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.schedule import rng
from stoker.schedule.orders.drawing import DrawnOrder, by_user
from stoker.schedule.orders.order import ListedOrder, Places, permutation
from stoker.schedule.orders.subset import EligibleIndices

# Neighbours whose weights are summed: 8 bytes for each block, and a place looks at all of one. With
# 4,096 a place takes 129 us; with 64, 1.7 us.
_BLOCK = 64
# Weights that are read at once, and places that are looked up at once: 8 and 2 MB. Chosen, not
# measured.
_READ_AT_ONCE = 1 << 20
_FOUND_AT_ONCE = 1 << 12
# Places that should be asked for at once: NumPy's cost of a call, 60 us, is 6 % of 1,024 places.
_TOGETHER = 1 << 10
# How far the first point is from the ends of its stretch: rounding moves no point across.
_MARGIN = 2.0**-20


class Weights:
    """The weights of a source's examples; of those that are no candidates they count as 0.

    Args:
        values: a weight for each number of the source; not copied.
        candidates: the numbers that may come.

    Attributes:
        total: their sum.

    Raises ValueError for other weights than finite numbers from 0, or without one above.
    """

    def __init__(self, values: NDArray[Any], candidates: EligibleIndices) -> None:
        self._values, self._candidates = values, candidates
        self._has_all = candidates.chosen is None and len(candidates) == len(values)
        blocks = -(-len(values) // _BLOCK)
        self._ends = np.zeros(blocks + 1)
        digest = 0
        for start in range(0, len(values), _READ_AT_ONCE):
            some = self._checked(start, min(start + _READ_AT_ONCE, len(values)))
            digest = zlib.crc32(some.tobytes(), digest)
            sums = np.add.reduceat(some, np.arange(0, len(some), _BLOCK))
            first = start // _BLOCK + 1
            self._ends[first : first + len(sums)] = sums
        self.digest = f"{digest:08x}"
        np.cumsum(self._ends, out=self._ends)
        self.total = float(self._ends[-1])
        if not self.total > 0 or not math.isfinite(self.total):
            what = "all weights are 0" if not self.total else "the sum of the weights is not finite"
            raise ValueError(f"{what}: nothing can be drawn by them")
        self._last = int(self._ends.searchsorted(self.total)) - 1  # the last block with a weight

    def __len__(self) -> int:
        return len(self._values)

    def _checked(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the weights of numbers ``start .. stop - 1``, once they are known to be some."""
        some = np.asarray(self._values[start:stop], np.float64)
        wrong = ~(np.isfinite(some) & (some >= 0))
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"the weight of example {start + at} is {some[at]}: weights are numbers from 0"
            )
        return some if self._has_all else self._of_candidates(some, np.arange(start, stop))

    def _of_candidates(
        self, weights: NDArray[np.float64], numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        mine = self._candidates.has(numbers.ravel()).reshape(numbers.shape)
        return np.where(mine, weights, 0.0)

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the numbers on whose weights points lie, from 0 to ``total`` along the line."""
        found = np.empty(len(points), np.int64)
        for start in range(0, len(points), _FOUND_AT_ONCE):
            found[start : start + _FOUND_AT_ONCE] = self._find(
                points[start : start + _FOUND_AT_ONCE]
            )
        return found

    def _find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        blocks = np.minimum(self._ends.searchsorted(points, "right") - 1, self._last)
        numbers = (blocks * _BLOCK)[:, None] + np.arange(_BLOCK)
        weights = self._values.take(numbers, mode="clip").astype(np.float64)
        if not self._has_all:
            weights = self._of_candidates(weights, np.minimum(numbers, len(self._values) - 1))
        if len(self._values) % _BLOCK:
            weights[numbers >= len(self._values)] = 0.0
        ends = weights.cumsum(axis=1)
        within = (ends <= (points - self._ends[blocks])[:, None]).sum(axis=1)
        last = (ends < ends[:, -1:]).sum(axis=1)  # rounding may put a point behind it
        found: NDArray[np.int64] = blocks * _BLOCK + np.minimum(within, last)
        return found

    def draw_distinct(self, count: int, key: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return different numbers, drawn one after another by the weights of those left.

        The smallest of exponential times with the weights as rates (Efraimidis and Spirakis 2006).
        Raises ValueError if fewer have a weight above 0.
        """
        weights = self._checked(0, len(self._values))
        able = np.flatnonzero(weights > 0)
        if len(able) < count:
            raise ValueError(
                f".sample(replacement=False): an epoch has {count:,} different examples, and only "
                f"{len(able):,} have a weight above 0"
            )
        times = rng.AddressedGenerator().at(key, 0, 1).exponential(size=len(able)) / weights[able]
        drawn: NDArray[np.int64] = able[np.argsort(times, kind="stable")[:count]]
        return drawn

    def repeats(self, batch: int, count: int) -> float:
        """Return how many of a batch are expected to be another example's repeats.

        ``count``: the places of an epoch.
        """
        distinct = 0.0
        for start in range(0, len(self._values), _READ_AT_ONCE):
            stop = min(start + _READ_AT_ONCE, len(self._values))
            shares = self._checked(start, stop) * (batch / self.total)  # of a batch
            # An example that comes once an epoch at most comes once in a batch.
            come = np.where(shares * count <= batch, shares, -np.expm1(-shares))
            distinct += float(come.sum())
        return max(0.0, batch - distinct)


class WeightedOrder:
    """Each example comes as often as its share of the places, rounded down or up."""

    together = _TOGETHER

    def __init__(self, weights: Weights, count: int, key: NDArray[np.uint64]) -> None:
        self._weights, self._count = weights, count
        self._points = permutation(count, key)
        begin = rng.AddressedGenerator().at(key, 0, 1).random()  # word 0 draws the permutation
        self._begin = _MARGIN + begin * (1 - 2 * _MARGIN)
        self._step = weights.total / max(1, count)
        self.digest = weights.digest

    def __len__(self) -> int:
        return self._count

    def at(self, places: Places) -> NDArray[np.int64]:
        points = self._points.at(places).astype(np.float64)
        points += self._begin
        points *= self._step
        return self._weights.find(points)


class WeightedDrawing:
    """Draws epochs by weights, as ``OwnDrawing`` does by a function.

    Args:
        weights: of the source's examples, or a function of the epoch that returns them.
        num_samples: the places of an epoch, None for as many as there are candidates.
        replacement: whether an example may come several times.
    """

    def __init__(
        self,
        weights: Weights | Callable[[int], Any],
        num_samples: int | None,
        replacement: bool = True,
    ) -> None:
        self._weights, self._num_samples = weights, num_samples
        self._replacement = replacement

    @property
    def calls_user(self) -> bool:
        return not isinstance(self._weights, Weights)

    def count(self, candidates: int) -> int:
        return candidates if self._num_samples is None else self._num_samples

    def order(
        self, candidates: EligibleIndices, length: int, seed: int, epoch: int, purpose: int
    ) -> DrawnOrder:
        weights, count = self._weights, self.count(len(candidates))
        if not isinstance(weights, Weights):
            with by_user("sample(fn)"):
                weights = Weights(as_weights(weights(epoch), length), candidates)
        key = rng.key(seed, epoch, purpose)
        if self._replacement:
            return WeightedOrder(weights, count, key)
        return ListedOrder(weights.draw_distinct(count, key), weights.digest)


def as_weights(values: Any, length: int) -> NDArray[Any]:
    """Return a weight for each of so many examples; a copy, unless nobody may write to them.

    Raises TypeError or ValueError for others.
    """
    weights: NDArray[Any] = np.asarray(values)
    if weights.ndim != 1 or weights.dtype.kind not in "fiub":
        raise TypeError(
            f"weights are a list or an array of a number for each example, not of shape "
            f"{weights.shape} and {weights.dtype}"
        )
    if len(weights) != length:
        raise ValueError(
            f"there are {len(weights):,} weights, and the source has {length:,} examples: give one "
            "for each, by its number in the source"
        )
    return weights.copy() if weights.flags.writeable else weights
