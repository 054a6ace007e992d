"""Dealing: which places of an epoch are a rank's rows, in their order.

By default ranks take turns (``StridedSharding``), so that a global batch, what all ranks read in a
step, is a run of the epoch whatever the number of ranks. Where an order is by blocks each rank has
a run of it, so that ranks read different blocks. ``PaddedSharding`` deals all examples, in the
data's order, for evaluation, ``BalancedSharding`` each global batch for equal work. The parts of a
mixture are dealt by ``PartSharding`` or ``PartwiseSharding``.

All of it is decided on integers, so that every rank deals alike without a word to the others.
"""

from __future__ import annotations

import functools
import heapq
import threading
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.costs import Costs
from stoker.schedule.epoch_rest import UnreadRanges
from stoker.schedule.orders.mixed import interleave_places, parts_and_numbers
from stoker.schedule.orders.order import Order, Places, as_array, offset_places
from stoker.schedule.proportions import PartRow

# Rows whose places and numbers are remembered, in 4 MB at most: a resumed pool reaches back, and
# readers ahead. Chosen, not measured.
_REMEMBERED_ROWS = 1 << 18
_REMEMBERED = 64
# Rows of a mixture that are dealt at once: enough that NumPy's cost a call is spread, few enough
# for 64 KB. Chosen, not measured.
_MIXED_ROWS = 1 << 13


class Sharding(Protocol):
    """Says which places are a rank's rows. Safe to use from any thread.

    Attributes:
        together: where rows are dealt by global batches, how many are dealt at once: ``places`` is
            then asked for ranges that begin at a multiple of it. 0 where any rows will do.
    """

    @property
    def together(self) -> int: ...

    def places(self, rows: Places) -> Places:
        """Return the places of these rows of the rank, in their order."""
        ...


class EpochIndices:
    """The order of an epoch as one rank reads it: its rows, their places, the numbers there.

    Safe to use from any thread.

    Args:
        order: of the epoch.
        deal: which places are this rank's.
        count: how many rows it has.
        start: how many rows of the deal come before them.

    Attributes:
        order, deal: as given.
        digest: of an order that is drawn by weights or a function, which tells it from another; ""
            for other orders.
        stride: the deal of its rows, if that is one; None otherwise.
        padded: the deal, where that pads; None otherwise.
    """

    def __init__(self, order: Order, deal: Sharding, count: int, start: int = 0) -> None:
        self.order, self.deal = order, deal
        self.digest: str = getattr(order, "digest", "")
        within = deal.within if isinstance(deal, RestSharding) else deal
        self.padded = within if isinstance(within, PaddedSharding) else None
        self._count, self._start = count, start
        self.stride: StridedSharding | None = None
        if isinstance(deal, StridedSharding):
            self.stride = StridedSharding(deal.first + start * deal.step, deal.step)
        self._is_whole = self.stride == StridedSharding()  # rows are places
        each = deal.together or 1
        self._rows = -(-max(order.together, deal.together) // each) * each
        most = max(4, min(_REMEMBERED, _REMEMBERED_ROWS // (self._rows or 1)))
        self._remembered = functools.lru_cache(most)(self._make_block)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def span(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the numbers at rows ``start .. stop - 1``, ``int64``; possibly a view."""
        if self._rows:
            return self._from_blocks(start + self._start, stop + self._start, 1)
        if self._is_whole:
            return self.order.at(range(start, stop))
        if self.stride is None:
            return self.order.at(self.places(range(start, stop)))
        first, step = self.stride.first, self.stride.step
        return self.order.at(range(first + start * step, first + stop * step, step))

    def places(self, rows: Places) -> Places:
        """Return the places of rows; ranges have step 1."""
        if self._start:
            rows = offset_places(rows, self._start)
        if not self.deal.together:
            return self.deal.places(rows)
        if isinstance(rows, range):
            return self._from_blocks(rows.start, rows.stop, 0)
        blocks, within = np.divmod(rows, self._rows)
        found = np.empty(len(rows), np.int64)
        for number in np.unique(blocks).tolist():
            mine = blocks == number
            found[mine] = self._block(number)[0][within[mine]]
        return found

    def at(self, places: Places) -> NDArray[np.int64]:
        """Return the numbers at places, ``int64``."""
        return self.order.at(places)

    def _from_blocks(self, start: int, stop: int, which: int) -> NDArray[np.int64]:
        each = self._rows
        parts = [
            self._block(number)[which][max(start - number * each, 0) : stop - number * each]
            for number in range(start // each, -(-stop // each))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def _block(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with self._lock:  # an order may be a user's object
            return self._remembered(number)

    def _make_block(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the places of a block of rows, and the numbers there."""
        first = number * self._rows
        places = self.deal.places(range(first, min(first + self._rows, self._start + self._count)))
        return as_array(places) if self.deal.together else _NONE, self.order.at(places)


_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class StridedSharding:
    """Each ``step``-th place from ``first`` on: ranks take turns, or with step 1 have runs."""

    first: int = 0
    step: int = 1
    together: ClassVar[int] = 0

    def places(self, rows: Places) -> Places:
        first, step = self.first, self.step
        if isinstance(rows, range):
            return range(first + rows.start * step, first + rows.stop * step, step)
        return rows * step + first


class RestSharding:
    """A deal of what is left of an epoch.

    Args:
        within: deals that, by its numbers in the leg's row.
        rest: the row.

    Attributes:
        within: as given.
    """

    def __init__(self, within: Sharding, rest: UnreadRanges) -> None:
        self.within, self._rest = within, rest
        self.together = within.together

    @staticmethod
    def of(within: Sharding, rest: UnreadRanges) -> Sharding:
        """Return the deal; of turns at one range these are turns again."""
        if isinstance(within, StridedSharding) and rest.first is not None:
            return StridedSharding(rest.first + within.first, within.step)
        return RestSharding(within, rest)

    def places(self, rows: Places) -> Places:
        return self._rest.at(self.within.places(rows))


class CarriedSharding:
    """A deal whose first rows are not dealt by the row of a leg: a pool holds them, for one.

    Args:
        held: their places.
        within: the rows behind them.

    Attributes:
        held, within: as given.
    """

    together = 0

    def __init__(self, held: NDArray[np.int64], within: EpochIndices) -> None:
        self.held, self.within = held, within

    def places(self, rows: Places) -> Places:
        count = len(self.held)
        if isinstance(rows, range) and rows.start >= count:
            return self.within.places(range(rows.start - count, rows.stop - count))
        rows = as_array(rows)
        found = np.empty(len(rows), np.int64)
        is_held = rows < count
        found[is_held] = self.held[rows[is_held]]
        found[~is_held] = as_array(self.within.places(rows[~is_held] - count))
        return found


@dataclass(frozen=True)
class PaddedSharding:
    """Neighbours, padded at the end.

    A global batch is dealt in equal runs, rank by rank. So what ranks gather is in the epoch's
    order. In the last one the runs are as short as holds all that is left, or as long as ever;
    places behind the epoch's end are padding, and come last.

    Attributes:
        rank, world: this rank among so many.
        each: its rows of a global batch.
        fills: whether they are as many in the last one.
        length: how many places the epoch has, without padding.
    """

    rank: int
    world: int
    each: int = 1
    fills: bool = False
    length: int = 0
    together: ClassVar[int] = 0

    @property
    def rows(self) -> int:
        """The rows that each rank has."""
        if self.fills:
            return -(-self.length // (self.world * self.each)) * self.each
        return -(-self.length // self.world)

    @property
    def remainder(self) -> int:
        """How many examples the last global batch holds; 0 if it is full."""
        return self.length % (self.world * self.each)

    def places(self, rows: Places) -> NDArray[np.int64]:
        """Return the places of rows; from ``length`` on they are padding."""
        batch, row = np.divmod(as_array(rows), self.each)
        run = np.minimum(self.each, self.rows - batch * self.each)
        places: NDArray[np.int64] = batch * (self.each * self.world) + self.rank * run + row
        return places

    def valid(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of rows ``start .. stop - 1`` are not padding."""
        return self.places(range(start, stop)) < self.length


class PartSharding:
    """Of each global batch of a mixture an equal share of each part, as nearly as can be.

    The examples of a global batch, sorted by part, are dealt in turns. Ranks begin in turns, too,
    or with small batches some would have one part alone. Inside its batch a rank's examples of a
    part are spread evenly.

    Args:
        row: of the parts; ``parts``: how many they are.
        rank, world: this process among so many.
        group: the rows that a rank has of a global batch; of the last one, fewer.
        count: the rows that it has of the epoch.
        first: how much of the row of parts was dealt before.

    Attributes:
        first: as given.
    """

    def __init__(
        self,
        row: PartRow,
        parts: int,
        rank: int,
        world: int,
        group: int,
        count: int,
        first: int = 0,
    ) -> None:
        self._row, self._parts = row, parts
        self._rank, self._world, self._group, self._count = rank, world, group, count
        self.first = first
        self.together = group * max(1, _MIXED_ROWS // group)

    def places(self, rows: Places) -> NDArray[np.int64]:
        """Return the places of the rows of whole global batches."""
        assert isinstance(rows, range)
        parts, world = self._parts, self._world
        if world == 1:
            first = self.first
            return interleave_places(*self._row.parts(first + rows.start, first + rows.stop), parts)
        group = self._group
        begins, sizes, firsts, own = self._shares(rows.start // group, -(-rows.stop // group))
        each = own.ravel()  # batch by batch, part by part
        of = np.repeat(np.arange(len(each)), each)
        turns = np.arange(len(of)) * world
        # Of each its number among those of its part in the global batch: ``nth[of] + turns``.
        nth = firsts.ravel() - world * (np.cumsum(each) - each)
        spread = group / np.maximum(1, 2 * sizes.ravel())
        where = (2 * (nth[of] + turns) + 1) * spread[of]  # from 0 to the rank's rows
        where += np.repeat(np.arange(len(own)) * group, own.sum(axis=1))
        kind = np.min_scalar_type(len(own) * group)
        turn = np.argsort(where.astype(kind), kind="stable")  # in linear time, if 16 bits do
        part = np.tile(np.arange(parts), len(own))
        return interleave_places(part[of], (begins.ravel() + nth)[of] + turns, parts)[turn]

    def counts(self, rows: int) -> list[int]:
        """Return how many of the rank's first so many rows are of each part."""
        if self._world == 1:
            before, after = self._row.counts_at(np.array([0, rows]) + self.first).T
            return list(map(int, after - before))
        whole, over = divmod(rows, self._group)
        found = np.zeros(self._parts, np.int64)
        for first in range(0, whole, _MIXED_ROWS):
            found += self._shares(first, min(whole, first + _MIXED_ROWS))[3].sum(axis=0)
        if over:
            start = whole * self._group
            last = self.places(range(start, min(start + self._group, self._count)))[:over]
            found += np.bincount(parts_and_numbers(last, self._parts)[0], minlength=self._parts)
        counts: list[int] = found.tolist()
        return counts

    def _shares(
        self, first: int, last: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return what global batches ``first .. last - 1`` have of each part, ``[batches, parts]``.

        The number in the part where each begins, how many there are, which of them is this rank's
        first one, and how many are this rank's.
        """
        world, batches = self._world, np.arange(first, last + 1)
        ends = np.minimum(batches * self._group, self._count) * world + self.first
        begins = self._row.counts_at(ends).T
        sizes = np.diff(begins, axis=0)
        before = np.cumsum(sizes, axis=1) - sizes
        mine = ((self._rank + batches[:-1, None]) - before) % world
        return begins[:-1], sizes, mine, np.maximum(0, (sizes - mine + world - 1) // world)


class PartwiseSharding:
    """All ranks have the same part at a time, each a run of its own of what the epoch has of it.

    So for factors by part, where ranks must use as much at the same steps, and for parts that are
    shuffled by blocks, where ranks are to read different ones.

    Args:
        row: of the parts, as each rank has it.
        rank: this process.
        count: the rows that it has of the epoch.
    """

    together = _MIXED_ROWS
    first = 0

    def __init__(self, row: PartRow, rank: int, count: int) -> None:
        self._row = row
        self._begins = rank * np.array(row.counts(count), np.int64)

    def places(self, rows: Places) -> NDArray[np.int64]:
        assert isinstance(rows, range)
        parts, numbers = self._row.parts(rows.start, rows.stop)
        return interleave_places(parts, numbers + self._begins[parts], len(self._begins))

    def counts(self, rows: int) -> list[int]:
        return self._row.counts(rows)


class BalancedSharding:
    """Of each global batch equally many rows, of about equal cost.

    The longest first, each to the rank that has the least to do and still has room: equally many
    rows for all. bench/results/balance.json has what that gains over ranks that take turns. A
    rank's rows are in the order of their cost, the most expensive first: pools of an echo draw the
    same rows on all ranks, so what they draw is balanced, too.

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
