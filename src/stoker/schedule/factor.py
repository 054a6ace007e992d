"""How often each fresh item is used: error diffusion over exact fractions."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray


def exact_factor(factor: Any) -> Fraction:
    """Return an echoing factor as a fraction: 2.1 means 21/10, not its binary neighbour.

    Raises:
        TypeError: it is no number.
        ValueError: it is below 1, or not finite.
    """
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(f"the echoing factor must be a number of at least 1, not {factor!r}")
    if not math.isfinite(factor) or factor < 1:
        raise ValueError(
            f"the echoing factor must be a finite number of at least 1, not {factor!r}: "
            "every fresh example is used at least once"
        )
    # A denominator of a million: exact for what people write, and products stay within 64 bits.
    if isinstance(factor, numbers.Rational):
        return Fraction(factor).limit_denominator(10**6)
    return Fraction(str(factor)).limit_denominator(10**6)


class UseCounts(Protocol):
    """How often each fresh item of an epoch is used, by its ordinal. Pickles."""

    @property
    def most(self) -> int:
        """The most uses of an item."""

    @property
    def held(self) -> int:
        """How many items, the first ones, a pool holds when it begins."""

    def of_first(self, items: int) -> int:
        """Return how many uses the first ``items`` fresh items have together."""

    def of(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the uses of the items with these ordinals, ``int64 [n]``, each at least 1."""


@dataclass(frozen=True)
class EvenUses:
    """The same factor for all: each item has ``floor(e)`` or ``ceil(e)`` uses.

    Attributes:
        factor: the exact echoing factor, at least 1.
    """

    factor: Fraction
    held: ClassVar[int] = 0

    @property
    def most(self) -> int:
        return math.ceil(self.factor)

    def of_first(self, items: int) -> int:
        """Return the uses of the first ``items``: within 1 of ``e * items``."""
        return self.factor.numerator * items // self.factor.denominator

    def of(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        p, q = self.factor.numerator, self.factor.denominator
        if q == 1:
            return np.full(len(ordinals), p, np.int64)
        return (ordinals + 1) * p // q - ordinals * p // q


class UsesOfLeg:
    """Uses in a leg of an epoch: the first items are in the pool already, and were used before.

    Args:
        remaining: the uses that those have left; ``spent``: those that they had.
        fresh: of the items behind them, which are numbered from 0 on there.

    Attributes:
        most, held: as ``UseCounts`` has them.
    """

    def __init__(
        self, remaining: NDArray[np.int64], spent: NDArray[np.int64], fresh: UseCounts
    ) -> None:
        self._remaining, self._spent, self._fresh = remaining, spent, fresh
        self.most, self.held = fresh.most, len(remaining)
        self._left = int(remaining.sum())

    def of_first(self, items: int) -> int:
        """Return the uses of the first ``items`` in this leg."""
        if items < self.held:
            return int(self._remaining[:items].sum())
        return self._left + self._fresh.of_first(items - self.held)

    def of(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the uses of items in all, also those before this leg."""
        is_held = ordinals < self.held
        found = np.empty(len(ordinals), np.int64)
        held = ordinals[is_held]
        found[is_held] = self._remaining[held] + self._spent[held]
        found[~is_held] = self._fresh.of(ordinals[~is_held] - self.held)
        return found
