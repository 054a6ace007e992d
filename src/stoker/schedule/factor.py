"""How often each fresh item is used: error diffusion over exact fractions."""

from __future__ import annotations

import math
import numbers
from fractions import Fraction
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
    if isinstance(factor, numbers.Rational):
        return Fraction(factor).limit_denominator(10**6)
    return Fraction(str(factor)).limit_denominator(10**6)


def uses_of_first(factor: Fraction, items: int) -> int:
    """Return how many uses the first ``items`` fresh items have together: within 1 of e * n."""
    return factor.numerator * items // factor.denominator


def counts(factor: Fraction, start: int, stop: int) -> NDArray[np.int64]:
    """Return the uses of items ``start .. stop - 1``: each ``floor(e)`` or ``ceil(e)``."""
    if factor.denominator == 1:
        return np.full(stop - start, factor.numerator, np.int64)
    return counts_of(factor, np.arange(start, stop, dtype=np.int64))


def counts_of(factor: Fraction, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the uses of the items with these ordinals, ``int64 [n]``."""
    p, q = factor.numerator, factor.denominator
    if q == 1:
        return np.full(len(ordinals), p, np.int64)
    return (ordinals + 1) * p // q - ordinals * p // q
