"""How often each fresh item is used: error diffusion over exact fractions."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

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


def _none() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class EvenUses:
    """How often each fresh item is used, by its ordinal: ``floor(e)`` or ``ceil(e)`` times.

    In a leg of an epoch the first items are in the pool when it begins, and were used before; the
    factor holds for those behind them. Pickles.

    Attributes:
        factor: the exact echoing factor ``e``, at least 1.
        remaining: the uses that each of the first items has left; ``spent``: those that it had.
    """

    factor: Fraction
    remaining: NDArray[np.int64] = field(default_factory=_none, compare=False, repr=False)
    spent: NDArray[np.int64] = field(default_factory=_none, compare=False, repr=False)

    @property
    def most(self) -> int:
        """The most uses of an item."""
        return math.ceil(self.factor)

    @cached_property
    def held(self) -> int:
        """How many items, the first ones, a pool holds when it begins."""
        return len(self.remaining)

    @cached_property
    def _left(self) -> int:
        return int(self.remaining.sum())

    def of_first(self, items: int) -> int:
        """Return how many uses the first ``items`` have together; without a leg within 1 of
        ``e * items``."""
        fresh = items - self.held
        if fresh < 0:
            return int(self.remaining[:items].sum())
        return self._left + self.factor.numerator * fresh // self.factor.denominator

    def of(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the uses of these items in all, also before the leg: ``int64 [n]``, at least 1."""
        p, q = self.factor.numerator, self.factor.denominator
        if not self.held:
            if q == 1:
                return np.full(len(ordinals), p, np.int64)
            return (ordinals + 1) * p // q - ordinals * p // q
        found = EvenUses(self.factor).of(ordinals - self.held)
        is_held = ordinals < self.held
        held = ordinals[is_held]
        found[is_held] = self.remaining[held] + self.spent[held]
        return found
