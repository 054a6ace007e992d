"""Samples of how workers spend their time.

Now and then a worker takes the clocks of its thread for a chunk of work (``ThreadTimer``), which
stands for the chunks before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stoker.engine.workers.cost import CostEstimate
from stoker.stats import WorkerTime

TIMED = slice(-5, -1)
"""The counters of a segment that hold its samples: rows, and the three times of ``ThreadTimer``."""
# Work of each thread without a sample: a sample costs 20 to 50 us, so under 0.3 %; and it releases
# the GIL six times, so the threads together must not take more of them the more they are.
SAMPLED_NS = 16_000_000


def worker_time(
    spent: Mapping[int, list[int]], costs: Mapping[int, CostEstimate], sharing: int
) -> WorkerTime | None:
    """Return how workers spent their time; None without samples.

    Args:
        spent: the counters of each segment.
        costs: the cost of each segment.
        sharing: how many workers share one GIL.
    """
    asleep_ns, are_told_apart = 0.0, True
    sums = np.zeros(3)
    for part, counters in spent.items():
        rows, *times = counters[TIMED]
        if not rows:
            continue
        wall_ns, running_ns, _ = times
        sums += times
        blocked_ns = max(0, wall_ns - running_ns)
        alone_ns = costs[part].asleep_row_ns if part in costs else None  # a new epoch forgets them
        # If half a processor does all of the work, the GIL is free most of the time.
        if sharing < 2 or sharing * running_ns < 0.5 * wall_ns:
            asleep_ns += blocked_ns
        elif alone_ns is not None:
            asleep_ns += min(blocked_ns, alone_ns * rows)
        else:
            are_told_apart = False
    wall, running, cpu = sums.tolist()
    if not wall:
        return None
    running = min(wall, running)
    cpu = min(cpu, running)
    blocked = wall - running
    asleep = min(blocked, asleep_ns) / wall if are_told_apart else None
    return WorkerTime(wall / 1e9, cpu / wall, (running - cpu) / wall, blocked / wall, asleep)
