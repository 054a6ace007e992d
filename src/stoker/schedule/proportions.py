"""Decides the next part of a mixture: error diffusion over exact weights, by integers.

A row of places is split in two by Bresenham's rule, in proportion to the weights of two halves of
the parts; each half's places are split again, down to single parts. So the part of any place, and
its number within that part, follow from a few integers. After any number of places each part has
its exact share within two (of two parts within one half), and after each ``total`` of them
exactly.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.progress import Progress

MOST_TOTAL = 1 << 30
"""The largest sum of weights that is kept exactly; more is rounded to it (to 1 in 2**29), so
that products of it with places stay within 63 bits."""

_MOST_TABLED = 1 << 16
"""The longest round whose parts are looked up in a table, of a MiB. In a longer one they are
computed."""

_PIECES = 128
"""Where an epoch's weights change, the stretches in which they stay: so the steps of a smooth
schedule are below 1 % of its range. Chosen, not measured."""

_WHOLE = 1 << 20
"""What the shares of a piece add up to, so that all ranks round alike."""

_Tree = int | tuple[int, int, Any, Any]
"""A part; or the weight of the left half, that of both, and the halves."""


def whole_weights(weights: Sequence[Any]) -> tuple[int, ...]:
    """Return weights as whole numbers in the same proportions: 0.7 and 0.3 as 7 and 3.

    Raises:
        TypeError: one is no number.
        ValueError: one is not finite, or not above 0.
    """
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise TypeError(f"a weight is a number above 0, not {weight!r}")
        if not math.isfinite(weight) or weight <= 0:
            raise ValueError(f"a weight is a finite number above 0, not {weight!r}")
    exact = [
        Fraction(w) if isinstance(w, numbers.Rational) else Fraction(str(float(w))) for w in weights
    ]
    shared = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * shared) for weight in exact]
    total = sum(whole)
    if total // math.gcd(*whole) > MOST_TOTAL:
        whole = [max(1, weight * (MOST_TOTAL // 2) // total) for weight in whole]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)


class Proportions:
    """An endless row of places, each for one of several parts, in exact proportions. Pickles.

    Attributes:
        weights: of the parts, whole numbers; ``total``: their sum, after which the row repeats.
    """

    def __init__(self, weights: tuple[int, ...]) -> None:
        self.weights = weights
        self.total = sum(weights)
        by_weight = sorted(range(len(weights)), key=lambda part: -weights[part])
        self._tree = self._split(by_weight)

    def __reduce__(self) -> tuple[Any, ...]:
        return Proportions, (self.weights,)

    def counts(self, places: int) -> list[int]:
        """Return how many of the first ``places`` each part has."""
        rounds, rest = divmod(places, self.total)
        return [
            rounds * weight + own
            for weight, own in zip(self.weights, self._divide(rest), strict=True)
        ]

    def counts_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``counts`` for many numbers of places, ``int64 [parts, n]``."""
        rounds, rest = np.divmod(places, self.total)
        whole: NDArray[np.int64] = np.array(self.weights)[:, None] * rounds
        whole += np.stack(self._divide(rest))
        return whole

    def _divide(self, places: Any) -> list[Any]:
        """Return how many of the first places of a round each part has."""
        found: list[Any] = [0] * len(self.weights)
        waiting: list[tuple[_Tree, Any]] = [(self._tree, places)]
        while waiting:
            node, count = waiting.pop()
            if isinstance(node, int):
                found[node] = count
            else:
                left, both, *halves = node
                on_left = _share(count, left, both)
                waiting += zip(halves, (on_left, count - on_left), strict=True)
        return found

    def parts(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the parts of places ``start .. stop - 1``, and each one's number in its part."""
        return self.parts_of(np.arange(start, stop))

    def parts_of(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the parts of these places, and each one's number in its part."""
        rounds, rest = np.divmod(places, self.total)
        if self.total > _MOST_TABLED:
            parts, numbers_in = self._find_parts(rest)
        else:
            parts, numbers_in = (column[rest] for column in self._table)
        return parts, numbers_in + rounds * np.array(self.weights)[parts]

    @cached_property
    def _table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The result of ``parts`` for the first round."""
        return self._find_parts(np.arange(self.total))

    def _find_parts(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Compute the result of ``parts_of`` for places in the first round."""
        parts, numbers_in = np.empty_like(places), np.empty_like(places)
        waiting = [(self._tree, places, np.arange(len(places)))]
        while waiting:
            node, own, where = waiting.pop()
            if isinstance(node, int):
                parts[where], numbers_in[where] = node, own
                continue
            left, both, *halves = node
            before = _share(own, left, both)
            is_left = _share(own + 1, left, both) > before
            is_right = ~is_left
            waiting.append((halves[0], before[is_left], where[is_left]))
            waiting.append((halves[1], (own - before)[is_right], where[is_right]))
        return parts, numbers_in

    def longest(self, lengths: Sequence[int]) -> int:
        """Return how many places there are before one part has more than its length."""
        return self._last(sum(lengths), lambda counts: _fit(counts, lengths))

    def shortest(self, lengths: Sequence[int]) -> int:
        """Return how many places there are until each part has its length at least."""
        most = self.total * (1 + max(map(int.__floordiv__, lengths, self.weights)))
        return 1 + self._last(most, lambda counts: not _fit(lengths, counts))

    def _last(self, most: int, holds: Any) -> int:
        """Return the largest number of places whose counts a test holds for, as for fewer."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if holds(self.counts(middle)) else (low, middle - 1)
        return low

    def _split(self, parts: list[int]) -> _Tree:
        """Split parts, the heaviest first, into halves of nearly the same weight."""
        if len(parts) == 1:
            return parts[0]
        sums = np.cumsum([self.weights[part] for part in parts])
        both = int(sums[-1])
        at = 1 + int(np.abs(2 * sums[:-1] - both).argmin())
        return int(sums[at - 1]), both, self._split(parts[:at]), self._split(parts[at:])


class PieceRow:
    """A row of places whose proportions change from piece to piece.

    Args:
        ends: where each piece ends, ``int64 [pieces]``.
        counts: how many places of it each part has, ``int64 [pieces, parts]``.

    Attributes:
        bounds: where pieces begin, and where the last one ends.
        before: how many places each part has before those, ``int64 [pieces + 1, parts]``.
    """

    def __init__(self, ends: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        self.bounds = np.concatenate([np.zeros(1, np.int64), ends])
        none = np.zeros((1, counts.shape[1]), np.int64)
        self.before = np.concatenate([none, np.cumsum(counts, axis=0)])
        self._counts = counts
        self._pieces: dict[int, tuple[Proportions, NDArray[np.int64]]] = {}

    def counts(self, places: int) -> list[int]:
        found: list[int] = self.counts_at(np.array([places]))[:, 0].tolist()
        return found

    def counts_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        at = self._piece_of(places)
        found = self.before[at].T.copy()
        for number in np.unique(at).tolist():
            its = at == number
            row, parts = self._piece(number)
            found[np.ix_(parts, its)] += row.counts_at(places[its] - self.bounds[number])
        return found

    def parts(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        places = np.arange(start, stop)
        at = self._piece_of(places)
        found, numbers_in = np.empty_like(places), np.empty_like(places)
        for number in np.unique(at).tolist():
            its = at == number
            row, parts = self._piece(number)
            own, numbers_there = row.parts_of(places[its] - self.bounds[number])
            found[its] = parts[own]
            numbers_in[its] = numbers_there + self.before[number][parts[own]]
        return found, numbers_in

    def _piece_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.searchsorted(self.bounds, places, "right") - 1
        return np.minimum(found, len(self._counts) - 1)

    def _piece(self, number: int) -> tuple[Proportions, NDArray[np.int64]]:
        """Return a piece's own row, and the parts that it has places of."""
        known = self._pieces.get(number)
        if known is None:
            parts = np.flatnonzero(self._counts[number])
            row = Proportions(tuple(self._counts[number][parts].tolist()))
            known = self._pieces[number] = row, parts
        return known


PartRow = Proportions | PieceRow
"""A row of places, each for one of several parts."""


class ChangingWeights:
    """Weights that change while training goes on: what ``mix([a, b], weights=[fn, 1])`` says.

    An epoch is cut into pieces, in each of which the weights are those of its beginning. What each
    part was given follows what it should have been given by then within two examples.

    Args:
        weights: returns the weight of each part.
        parts: how many there are.
    """

    def __init__(self, weights: Callable[[Progress], Sequence[float]], parts: int) -> None:
        self._weights, self._parts = weights, parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_weights, ()  # workers are sent indices, and ask for no order

    def row(self, epoch: int, places: int) -> PieceRow:
        """Return the row of an epoch of so many places; raises what the function does."""
        pieces = max(1, min(places, _PIECES))
        bounds = [places * piece // pieces for piece in range(pieces + 1)]
        counts = np.zeros((pieces, self._parts), np.int64)
        due = np.zeros(self._parts, np.int64)  # of what was to be given, in 1 / _WHOLE
        given = np.zeros(self._parts, np.int64)
        for piece, begin in enumerate(bounds[:-1]):
            size = bounds[piece + 1] - begin
            shares = _shares_of(self._weights(Progress(epoch, begin / max(1, places))))
            due += shares * size
            counts[piece] = _rounded(due - given * _WHOLE, shares > 0, size)
            given += counts[piece]
        return PieceRow(np.array(bounds[1:], np.int64), counts)


def _no_weights() -> None:
    return None


def _shares_of(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return whole shares in proportion to weights, which add up to ``_WHOLE``."""
    exact = np.array(weights, np.float64)
    exact /= exact.max()
    shares: NDArray[np.int64] = np.round(exact / exact.sum() * _WHOLE).astype(np.int64)
    shares[shares.argmax()] += _WHOLE - shares.sum()
    return shares


def _rounded(due: NDArray[np.int64], may: NDArray[np.bool_], size: int) -> NDArray[np.int64]:
    """Return whole numbers near ``due / _WHOLE`` that add up to ``size``; 0 where none may be."""
    counts: NDArray[np.int64] = np.where(may, np.maximum(due, 0) // _WHOLE, 0)
    while (over := size - int(counts.sum())) != 0:
        lacking = np.where(may & ((over > 0) | (counts > 0)), due - counts * _WHOLE, 0)
        if over > 0:
            turn = np.argsort(np.where(may, -lacking, np.iinfo(np.int64).max), kind="stable")
            counts[turn[: min(over, int(may.sum()))]] += 1
        else:
            has = counts > 0
            turn = np.argsort(np.where(has, lacking, np.iinfo(np.int64).max), kind="stable")
            counts[turn[: min(-over, int(has.sum()))]] -= 1
    return counts


def _share(places: Any, left: int, both: int) -> Any:
    """Return the left half's number of ``places``, rounded half up."""
    return (2 * places * left + both) // (2 * both)


def _fit(counts: Sequence[int], lengths: Sequence[int]) -> bool:
    return all(count <= length for count, length in zip(counts, lengths, strict=True))
