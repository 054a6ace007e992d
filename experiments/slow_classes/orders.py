"""In what order the examples of an epoch come, by a simulated clock; see `ORDERS`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.late_order import LateOrder

Places = NDArray[np.int64]
"""Which example of the epoch's order comes at each place."""

WORKERS = 8
SLOW_TIME = 10.0
"""How long a worker takes for a slow example, as many times as for another."""


def in_order(is_slow: NDArray[np.bool_], batch_size: int) -> Places:
    """Return the epoch's own order."""
    return np.arange(len(is_slow))


def as_they_come(is_slow: NDArray[np.bool_], batch_size: int) -> Places:
    """Return the order in which workers end examples, each beginning the next when it is free."""
    free, ends = [0.0] * WORKERS, []
    for slow in is_slow.tolist():
        ends.append(heapq.heappop(free) + (SLOW_TIME if slow else 1.0))
        heapq.heappush(free, ends[-1])
    return np.argsort(ends, kind="stable")


def slow_last(is_slow: NDArray[np.bool_], batch_size: int) -> Places:
    """Return the fast examples of the epoch, then the slow ones: as far as such an order can go."""
    return np.argsort(is_slow, kind="stable")


def late(batches: int) -> Callable[[NDArray[np.bool_], int], Places]:
    """Return the order of `.batch(n, late=batches)` where the loop always waits for a batch."""

    def order(is_slow: NDArray[np.bool_], batch_size: int) -> Places:
        decided = LateOrder(batch_size, batches, len(is_slow))
        ends = np.full(len(is_slow), math.inf)
        free, now, begun = [0.0] * WORKERS, 0.0, 0
        places: list[int] = []
        while decided.batch < decided.batches:
            while begun < decided.within_reach() and free[0] <= now:
                ends[begun] = now + (SLOW_TIME if is_slow[begun] else 1.0)
                heapq.heapreplace(free, float(ends[begun]))
                begun += 1
            taken = decided.choose(lambda n, t=now: bool(ends[n] <= t), is_due=True).taken  # type: ignore[misc]
            if taken is None:
                now = min(end for end in free if end > now)
            else:
                places.extend(taken)
        return np.array(places)

    return order


ORDERS: Mapping[str, Callable[[NDArray[np.bool_], int], Places]] = {
    "in order": in_order,
    "`late=2`": late(2),
    "as they come": as_they_come,
    "slow ones last": slow_last,
}
