"""The model's formulas: rates from rates.

Rates are in examples per second: ``G`` of training alone, ``P`` of preparation from memory, ``S``
and ``C`` of storage and of the page cache. ``x`` is the cached fraction (Mohan et al., "Analyzing
and Mitigating Data Stalls in DNN Training", VLDB 2021, sections 3 to 5).

Functions are named by the quantity that they return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

MOST_WAITING = 8
"""Workers on a core if they mostly wait. More are neither tried nor advised, as each has memory of
its own."""


def fetch_rate(cached_fraction: float, storage: float, cache: float) -> float:
    """Return F(x) = 1 / (x/C + (1-x)/S) (VLDB 2021, equations 1 and 2)."""
    return inverse(cached_fraction / cache + (1.0 - cached_fraction) / storage)


def loader_rate(fetch: float, prep: float, waiting_s: float = 0.0) -> float:
    """Return the rate of fetch and prep together: ``1 / max(1/F, 1/P + w)``.

    ``w`` is the time that workers wait for misses, for each example: ``(1-x) * miss_s / W``. With
    w = 0 the rate is ``min(F, P)``.
    """
    return inverse(max(inverse(fetch), inverse(prep) + waiting_s))


def smallest_cache(
    storage: float, cache: float, prep: float, ingestion: float, miss_s: float = 0.0
) -> float:
    """Return x*, the smallest cached fraction with which training no longer waits for storage.

    That is, the smallest x with the same rate as x = 1. ``miss_s`` is the time that a miss adds to
    preparing, over all workers. If it is 0, x* is ``(1/S - 1/m) / (1/S - 1/C)`` with
    ``m = min(P, G)``, within 0 and 1.
    """
    # Slightly less, against rounding: at x = 1 the rate is the target itself.
    target = min(ingestion, loader_rate(cache, prep)) * (1.0 - 1e-9)

    def is_enough(cached_fraction: float) -> bool:
        fetch = fetch_rate(cached_fraction, storage, cache)
        return loader_rate(fetch, prep, (1.0 - cached_fraction) * miss_s) >= target

    if is_enough(0.0):
        return 0.0
    low, high = 0.0, 1.0
    # Halved until no bit of a float is left to decide.
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def prep_rate(curve: Sequence[tuple[int, float]], workers: float) -> float:
    """Return P for a number of workers, from the measured curve.

    Between two measured points it is linear. Above the last and below the first it is proportional
    to the workers, which is an assumption. ``workers`` of 0 is the training process itself.
    """
    if workers == 0 and curve[0][0] == 0:
        return curve[0][1]
    points = [point for point in curve if point[0] > 0]
    points = points or [(1, curve[0][1])]
    workers = max(1, workers)
    first, last = points[0], points[-1]
    if workers < first[0]:
        return first[1] * workers / first[0]
    if workers > last[0]:
        return last[1] * workers / last[0]
    return interpolate(points, workers)


def most_workers(cores: int, workers: int, rate: float, cpu_s: float) -> int:
    """Return the largest useful number of workers: more than ``cores`` if they mostly wait.

    ``workers`` prepare ``rate`` examples/s together. An example takes ``cpu_s`` processor seconds;
    0: unknown, and no more workers than cores. At most MOST_WAITING for each core.
    """
    if cpu_s <= 0.0:
        return cores
    busy = max(1.0 / MOST_WAITING, cpu_s * rate / max(1, workers))
    return max(cores, int(cores / busy))


def interpolate(points: Sequence[tuple[int, float]], at: float, empty: float = 0.0) -> float:
    """Return the value at a number of workers: linear between points, outside that of the nearest.

    ``empty`` is the value if there is no point.
    """
    if not points:
        return empty
    if at <= points[0][0]:
        return points[0][1]
    for (fewer, low), (more, high) in pairwise(points):
        if at <= more:
            return low + (high - low) * (at - fewer) / (more - fewer)
    return points[-1][1]


def inverse(value: float) -> float:
    """Return 1/value; 0 and infinity are each other's inverse."""
    if value <= 0.0:
        return math.inf
    return 0.0 if value == math.inf else 1.0 / value
