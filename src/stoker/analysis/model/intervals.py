"""Student's t intervals of a mean.

A t interval, not a bootstrap: resampling five values finds hardly any spread that the five do not
show, so that its 95 % interval of a mean holds in some 80 % of the cases; t knows that there are
five. One run that was disturbed widens the interval, and decides nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache

from stoker.analysis.model.report import Rate

# The usual one. "Worse" has to be found twice (gate/judging.py).
_CONFIDENCE = 0.95


def estimate_interval(values: Sequence[float]) -> Rate:
    """Return the mean of at least two values, and its 95 % interval."""
    mean = statistics.fmean(values)
    half = find_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Rate(mean, mean - half, mean + half)


@cache
def find_t(freedom: int) -> float:
    """Return Student's t for a two-sided 95 % interval; ``freedom`` is at least 1."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halves an angle to the last bit
        angle = (low + high) / 2
        low, high = (
            (angle, high) if _find_confidence(angle, freedom) < _CONFIDENCE else (low, angle)
        )
    return math.sqrt(freedom) * math.tan(low)


def _find_confidence(angle: float, freedom: int) -> float:
    """Return the probability of less than t = sqrt(freedom) * tan(angle), in absolute value.

    Abramowitz and Stegun, 26.7.3 and 26.7.4: a finite sum for each whole number of degrees.
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    term = total = cosine if freedom % 2 else 1.0
    for at in range(3 if freedom % 2 else 2, freedom, 2):
        term *= cosine * cosine * (at - 1) / at
        total += term
    if freedom % 2 == 0:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
