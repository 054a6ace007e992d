"""Whether the examples that come late are of a kind: larger ones, or of some labels.

Only batches that differ from the epoch's order are looked at, where late examples stand beside
those that came in their place. So it costs nothing while nothing is late.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

from stoker.basics import pytree

# So many values are labels; more are no classes, and would need memory without a limit.
_MOST_LABELS = 10_000
# Squares of larger numbers, and infinity, would spoil the sums.
_LARGEST = 1e150


class LateBias:
    """Correlates how late examples are, in batches, with their size and their scalar fields."""

    def __init__(self) -> None:
        self._numbers: dict[str, _Numbers] = defaultdict(_Numbers)
        self._labels: dict[str, _Labels] = defaultdict(_Labels)

    def note(self, example: Any, late: int) -> None:
        """Add an example that came so many batches after its own; below 0: before."""
        self._numbers["bytes"].add(float(pytree.data_bytes(example)), late)
        for name, leaf in zip(pytree.leaf_names(example), pytree.leaves(example), strict=True):
            if getattr(leaf, "ndim", None) == 0:  # an array, a NumPy number or a tensor
                leaf = leaf.item()
            name = name or "example"
            if isinstance(leaf, int | str):
                self._labels[name].add(leaf, late)
            if isinstance(leaf, int | float) and abs(leaf) < _LARGEST:
                self._numbers[name].add(float(leaf), late)

    def correlations(self) -> dict[str, float]:
        """Return the correlations that are known, by field; ``bytes`` is the example's size."""
        found = {name: each.correlation() for name, each in self._numbers.items()}
        for name, labels in self._labels.items():
            by_label = labels.correlation()
            found[name] = found.get(name) if by_label is None else by_label
        return {name: value for name, value in found.items() if value is not None}


class _Numbers:
    """Pearson's correlation of two series, from their sums."""

    def __init__(self) -> None:
        self._n = 0
        self._mean = np.zeros(2)
        self._spread = np.zeros((2, 2))

    def add(self, value: float, late: int) -> None:
        self._n += 1
        away = np.array([value, float(late)]) - self._mean
        self._mean += away / self._n
        self._spread += np.outer(away, away) * (1 - 1 / self._n)

    def correlation(self) -> float | None:
        scale = math.sqrt(self._spread[0, 0] * self._spread[1, 1])
        return float(self._spread[0, 1] / scale) if scale > 0 else None


class _Labels:
    """The part of the variance that labels explain, as its root: from 0 to 1.

    Epsilon squared (Kelley 1935): without the part that as many labels explain by chance.
    """

    def __init__(self) -> None:
        self._sums: dict[Any, tuple[int, int]] = {}  # by label: their number, and how late in all
        self._n = self._late = self._squares = 0

    def add(self, label: Any, late: int) -> None:
        if label not in self._sums and len(self._sums) >= _MOST_LABELS:
            return
        n, sum_ = self._sums.get(label, (0, 0))
        self._sums[label] = n + 1, sum_ + late
        self._n, self._late, self._squares = self._n + 1, self._late + late, self._squares + late**2

    def correlation(self) -> float | None:
        n, labels = self._n, len(self._sums)
        if not 1 < labels <= n // 2:  # else it is a number of the example, or the same in all
            return None
        total = self._squares - self._late**2 / n
        if total <= 0:
            return None
        within = self._squares - sum(s**2 / each for each, s in self._sums.values())
        return math.sqrt(max(0.0, 1 - within / (n - labels) * (n - 1) / total))
