"""The arithmetic that all comparisons share: intervals, pairs, misses, R.

Nothing is left out: a run that misses the target counts as a miss, and as the worst value wherever
a median is taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.9
"""A claim needs at least so much: five seeds."""


@dataclass(frozen=True)
class Interval:
    """Where the median of what was sampled lies."""

    low: float
    high: float
    confidence: float
    """With this probability, whatever the distribution, if the samples are independent."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Interval:
        """Return the narrowest between two samples, as many from either end, of `CONFIDENCE`.

        Each sample is below the median with probability 1/2: all of n are on one side of it with
        probability 2 / 2**n. Fewer than five samples give the widest, of a lower confidence.
        """
        n, left_out, outside = len(samples), 0, 2 / 2 ** len(samples)
        while (more := outside + 2 * math.comb(n, left_out + 1) / 2**n) <= 1 - CONFIDENCE:
            left_out, outside = left_out + 1, more
        ordered = sorted(samples)
        return cls(ordered[left_out], ordered[n - 1 - left_out], 1 - outside)


@dataclass(frozen=True)
class Ratios:
    """What a baseline needed over what an arm needed, one a pair of runs of the same seed."""

    values: tuple[float, ...]
    """Ascending; 0 where the arm missed."""
    are_bounds: bool
    """Whether a baseline missed: its whole length counts then, and the true ratio is larger."""

    @classmethod
    def of(
        cls,
        baselines: Sequence[float | None],
        lengths: Sequence[float],
        arms: Sequence[float | None],
    ) -> Ratios:
        """Pair them by place: a need, or None for a miss; `lengths` is what the baselines ran."""
        values = [
            0.0 if arm is None else (length if baseline is None else baseline) / arm
            for baseline, length, arm in zip(baselines, lengths, arms, strict=True)
        ]
        return cls(tuple(sorted(values)), any(baseline is None for baseline in baselines))

    @property
    def median(self) -> float | None:
        """The median; None if that is a miss, or there are none."""
        return (statistics.median(self.values) or None) if self.values else None


def median_or_miss(values: Sequence[float | None]) -> float | None:
    """Return the median, a miss (None) being worse than any value; None if it is a miss."""
    middle = statistics.median([math.inf if value is None else value for value in values])
    return None if math.isinf(middle) else middle


def ratio_of(waited_fraction: float) -> float:
    """Return R of a run without echoing, by the share of its time that it waited for data."""
    return 1 / (1 - waited_fraction)
