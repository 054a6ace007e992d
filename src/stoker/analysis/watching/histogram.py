"""A histogram of durations, for percentiles in constant memory."""

from __future__ import annotations

# Buckets for each power of two: a percentile is right within 1/16.
_BITS = 4


class DurationHistogram:
    """Counts durations by buckets that are a sixteenth wide.

    Attributes:
        count: how many there are.
        total_ns: their sum.
    """

    __slots__ = ("_buckets", "count", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self._buckets: dict[int, int] = {}

    def add(self, ns: int) -> None:
        """Count a duration of at least 0."""
        shift = max(0, ns.bit_length() - _BITS - 1)
        bucket = (shift << (_BITS + 1)) + (ns >> shift)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total_ns += ns

    def quantile(self, fraction: float) -> float:
        """Return the middle of the bucket that holds a quantile, in seconds; 0 without any."""
        left = fraction * (self.count - 1)
        for bucket, count in sorted(self._buckets.copy().items()):
            if left < count:
                shift, top = bucket >> (_BITS + 1), bucket & ((2 << _BITS) - 1)
                low = top << shift
                return (low + ((1 << shift) - 1) / 2) / 1e9
            left -= count
        return 0.0
