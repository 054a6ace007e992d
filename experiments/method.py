"""The arithmetic that all comparisons share: intervals, pairs, misses, crossings, R.

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


def smoothed(values: Sequence[float], width: int = 3) -> list[float]:
    """Return the mean of each value with those before it, `width` in all; fewer at the beginning.

    Nothing that comes later has a part in a value, so that no target is reached before its time.
    """
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def crossing(at: Sequence[float], values: Sequence[float], target: float) -> float | None:
    """Return where falling `values`, at ascending places, first come down to `target`.

    Between two places the line between their values counts. None if they never do.
    """
    for i, value in enumerate(values):
        if value > target:
            continue
        if i == 0:
            return at[0]
        share = (values[i - 1] - target) / (values[i - 1] - value)
        return at[i - 1] + share * (at[i] - at[i - 1])
    return None


def value_at(place: float, at: Sequence[float], values: Sequence[float]) -> float:
    """Return what lies on the line through `values` at ascending places; outside, the end's."""
    if place <= at[0]:
        return values[0]
    for i in range(1, len(at)):
        if place <= at[i]:
            share = (place - at[i - 1]) / (at[i] - at[i - 1])
            return values[i - 1] + share * (values[i] - values[i - 1])
    return values[-1]
