"""Equal work for ranks: each global batch stays as it is, and is dealt by what its rows cost.

The longest first, each to the rank that has the least to do and still has room: equally many rows
for all. bench/results/balance.json has what that gains over ranks that take turns.

A rank's rows are in the order of their cost, the most expensive first. Pools of an echo draw the
same rows on all ranks, and as these cost about the same everywhere, what they draw is balanced,
too.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.orders.order import Order, Places
from stoker.schedule.sizing.costs import Costs


class BalancedDeal:
    """Of each global batch equally many rows, of about equal cost.

    Args:
        order: of the epoch, which says what is to be dealt.
        costs: of its examples.
        rank, world: this process among so many.
        group: the rows that a rank has of a global batch; of the last one, fewer.
        count: the rows that it has of the epoch.
    """

    def __init__(
        self, order: Order, costs: Costs, rank: int, world: int, group: int, count: int
    ) -> None:
        self._order, self._costs = order, costs
        self._rank, self._world = rank, world
        self._group, self._count = group, count
        self.together = group * max(1, order.together // (group * world))

    def places(self, rows: Places) -> NDArray[np.int64]:
        """Return the places of the rows of whole global batches."""
        assert isinstance(rows, range)
        world, first = self._world, rows.start * self._world
        costs = self._costs.at(self._order.at(range(first, rows.stop * world)))
        dealt = [np.empty(0, np.int64)]
        for start in range(0, len(rows), self._group):
            stop = min(start + self._group, len(rows))
            of_batch = costs[start * world : stop * world]
            # Ranks take turns at being the first, or the largest example were always rank 0's.
            turn = (self._rank + (rows.start + start) // self._group) % world
            dealt.append(balanced(of_batch, turn, world) + (first + start * world))
        return np.concatenate(dealt)


def balanced(costs: NDArray[np.int64], rank: int, world: int) -> NDArray[np.int64]:
    """Return which of a global batch's places one rank gets, the most expensive first.

    Over all ranks every place comes once, and each rank gets equally many.

    Args:
        costs: of each place, shape [world * each].
        rank: the rank, of ``world``.
    """
    each = len(costs) // world
    longest_first = np.argsort(-costs, kind="stable")
    if world == 1:
        return longest_first
    free = [(0, one, 0) for one in range(world)]  # cost so far, rank, rows so far: a heap
    mine = []
    sorted_costs = costs[longest_first].tolist()
    for place, cost in zip(longest_first.tolist(), sorted_costs, strict=True):
        load, to, rows = free[0]
        if to == rank:
            mine.append(place)
        if rows + 1 < each:
            heapq.heapreplace(free, (load + cost, to, rows + 1))
        else:
            heapq.heappop(free)
    return np.array(mine, np.int64)
