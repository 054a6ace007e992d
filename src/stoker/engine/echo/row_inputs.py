"""The inputs of a segment after an echo of rows that lie in memory: their numbers.

Nothing is read for such a pool, and nothing is kept in it: each use is copied from where its row
lies, as it would be from the pool. So the segment behind gathers batches as it does without echo.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from stoker.engine.echo.pool_inputs import PooledInputs
from stoker.engine.items import EpochCounters, ItemUses, RowBatches, RowFeed
from stoker.engine.plan.points import EchoPoint
from stoker.engine.workers.threads import WorkerPool
from stoker.schedule.dealing import RankOrder
from stoker.schedule.sizing.cuts import Cuts
from stoker.sources.origin import IndexedSource


class RowInputs(PooledInputs, RowFeed):
    """The uses of rows in memory.

    Args:
        point, make_pool, tally: as ``EchoInputs`` has them.
        source: has the rows; ``order``: that of this epoch.
    """

    def __init__(
        self,
        point: EchoPoint,
        make_pool: Callable[[PooledInputs], Any],
        source: IndexedSource,
        order: RankOrder,
        tally: EpochCounters,
    ) -> None:
        super().__init__(point, make_pool, None, tally)
        self.total = self.echo.count(len(order))
        self._source, self._order = source, order
        self._items: dict[int, Any] = {}  # their indices in the source

    def count(self, at_least: int) -> int:
        return len(self._order)

    def first_value(self, worker_pool: WorkerPool) -> Any:
        rows = self._source.fetch(self._indices_of(range(min(1, len(self._order)))))
        return rows[0] if rows else None

    def item_bytes(self) -> int:
        return 0

    def clear(self) -> None:
        self._items.clear()
        super().clear()

    def batches(self, cuts: Cuts, number: int, count: int) -> RowBatches:
        uses, fresh = [], []
        for start, stop in pairwise(map(cuts.start, range(number, number + count + 1))):
            uses.append(self.take(stop - start))
            fresh.append(self.fresh)
        return RowBatches(uses, fresh)

    def _step(self) -> bool:
        pool = self.pool
        first, count = pool.admitted, pool.fresh_needed()
        if count:
            numbers = range(first, first + count)
            self._items.update(zip(numbers, self._indices_of(numbers), strict=True))
            pool.admit(count)
            self._fresh = pool.admitted
        if pool.exhausted:
            return False
        self._schedule(pool.draw(), 0)
        return True

    def _use(self, numbers: list[int], uses: list[int], last: list[int]) -> None:
        drawn, items = self._drawn, self._items
        try:
            drawn.items.extend([items[number] for number in numbers])
        except KeyError:  # after a resume
            for number in set(numbers) - items.keys():
                (items[number],) = self._indices_of(range(number, number + 1))
            drawn.items.extend([items[number] for number in numbers])
        for number in last:
            del items[number]
        drawn.ordinals.extend(numbers)
        drawn.use_keys.extend(uses)  # no echo is above it

    def _indices_of(self, numbers: range) -> list[int]:
        indices: list[int] = self._order.span(numbers.start, numbers.stop).tolist()
        return indices

    def recompute_uses(self, start: int, count: int) -> ItemUses:
        numbers, uses, ages = zip(*self._drawn_before(start, count), strict=True)
        indices = [self._indices_of(range(number, number + 1))[0] for number in numbers]
        return ItemUses(indices, list(numbers), list(uses), list(ages))
