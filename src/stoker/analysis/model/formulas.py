"""The formulas on numbers: rates from rates.

Rates are examples per second: ``G`` what training takes in, ``P`` what preparation gives from
memory, ``S`` and ``C`` what storage and the page cache deliver, ``x`` the cached fraction (Mohan
et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, sections 3 to 5).

Functions are named by the quantity that they return. The report page uses them too, translated by
``javascript.py``, which says what Python they may be written in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

INFINITE = math.inf
MOST_WAITING = 8
"""Workers on a core, where they mostly wait; more are neither tried nor advised, for each has
memory of its own."""


def fetch_rate(cached_fraction: float, storage: float, cache: float) -> float:
    """Return F(x) = 1 / (x/C + (1-x)/S) (VLDB 2021, equations 1 and 2)."""
    return inverse(cached_fraction / cache + (1.0 - cached_fraction) / storage)


def partitioned_rate(cache: float, network: float, hosts: int) -> float:
    """Return what a cache gives that hosts hold together, a part each.

    ``1 / (1/C + (1 - 1/H) / N)``: of what is cached a host holds an H-th; the rest comes from
    another host's memory, at the rate N of the network (partitioned caching: VLDB 2021, section
    6.2, undealt).
    """
    if hosts == 1:
        return cache
    return inverse(inverse(cache) + (1.0 - 1.0 / hosts) * inverse(network))


def loader_rate(fetch: float, prep: float, waiting_s: float = 0.0) -> float:
    """Return what fetch and prep give together: ``1 / max(1/F, 1/P + w)``.

    ``w`` is the time that workers wait for misses, an example: ``(1-x) * miss_s / W``. It is
    ``min(F, P)`` where w = 0.
    """
    return inverse(max(inverse(fetch), inverse(prep) + waiting_s))


def smallest_cache(
    storage: float, cache: float, prep: float, ingestion: float, miss_s: float = 0.0
) -> float:
    """Return x*, the smallest cached fraction with which training no longer waits for storage.

    That is, where loader and training give together what they give at x = 1. ``miss_s`` is what
    a miss adds to preparing, over all workers. Where that is 0, x* is ``(1/S - 1/m) / (1/S -
    1/C)`` with ``m = min(P, G)``, within 0 and 1.
    """
    # Less by what rounding may take: at x = 1 the rate is the target itself.
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


def page_cache_misses(cached_fraction: float) -> float:
    """Return the share of reads that miss an LRU page cache which holds that share of the data.

    ``m = t - t * ln(t)`` with ``t = 1 - x``, for an epoch in random order; a cache that never
    evicts misses ``1 - x``. (Linux is not a pure LRU: it does somewhat better.)
    """
    t = 1.0 - min(1.0, max(0.0, cached_fraction))
    return t - t * math.log(t) if t > 0.0 else 0.0


def prep_rate(curve: Sequence[tuple[int, float]], workers: float) -> float:
    """Return P for a number of workers, from the measured curve.

    Between two measured points: straight. Above the last one: in proportion, an assumption.
    Below the first: in proportion, too. ``workers`` of 0 is the training process itself.
    """
    if workers == 0 and curve[0][0] == 0:
        return curve[0][1]
    points = [point for point in curve if point[0] > 0]
    if len(points) == 0:
        points = [(1, curve[0][1])]
    workers = max(1, workers)
    first, last = points[0], points[-1]
    if workers < first[0]:
        return first[1] * workers / first[0]
    if workers > last[0]:
        return last[1] * workers / last[0]
    return interpolate(points, workers)


def most_workers(cores: int, workers: int, rate: float, cpu_s: float) -> int:
    """Return how many workers have a use: more than ``cores`` where they mostly wait.

    ``workers`` prepare ``rate`` examples/s together, each of which takes ``cpu_s`` processor
    seconds; 0: not known, and no more than cores. At most MOST_WAITING for each core.
    """
    if cpu_s <= 0.0:
        return cores
    busy = max(1.0 / MOST_WAITING, cpu_s * rate / max(1, workers))
    return max(cores, int(cores / busy))


def interpolate(points: Sequence[tuple[int, float]], at: float, empty: float = 0.0) -> float:
    """Return the value at a number of workers: straight between points, outside the nearest.

    ``empty``: where there is no point.
    """
    if len(points) == 0:
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
        return INFINITE
    return 0.0 if value == INFINITE else 1.0 / value
