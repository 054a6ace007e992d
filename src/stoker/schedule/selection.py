"""The examples of an epoch on a rank: chosen, shuffled, sharded, cut short.

Places count the chosen examples alone, from 0 on; the last step maps them to indices in the source.
An order that is drawn by weights, or by a user's function, has indices of the source at once.

With ``.shuffle().shard()`` ranks take turns at the places of a permutation of all examples. With
``.shard().shuffle()`` a rank reads a permutation of its own, fixed part. With
``.balance()`` it reads what ``BalancedSharding`` gives it of each ``world * batch`` places.
With ``remainder="pad"`` it reads a run of these places, and the last example again as padding. If
a permutation is by blocks, a rank's part is a run of it, so that ranks read different blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from stoker.schedule import rng
from stoker.schedule.costs import Costs
from stoker.schedule.epoch_rest import EpochRest, RestOrder
from stoker.schedule.orders.blocks import WINDOW, BlockOrder, cut_to
from stoker.schedule.orders.drawing import OwnDrawing
from stoker.schedule.orders.order import (
    CutOrder,
    FixedPart,
    FixedParts,
    Order,
    RepeatedEnd,
    permutation,
)
from stoker.schedule.orders.subset import EligibleIndices, Subset, SubsetOrder
from stoker.schedule.orders.weighted import WeightedDrawing
from stoker.schedule.sharding import (
    BalancedSharding,
    CarriedSharding,
    EpochIndices,
    PaddedSharding,
    RestSharding,
    Sharding,
    StridedSharding,
)


@dataclass(frozen=True)
class Share:
    """This process's part of an epoch.

    Attributes:
        rank, world: this process's rank, and the number of ranks.
        uneven: whether all examples are kept, so that parts may differ by one in length.
        anew: whether parts are drawn anew every epoch, rather than fixed.
        padding: the deal that pads equal parts, so that they hold all examples; or None.
        costs: the costs of examples, if each global batch is dealt for equal work; or None.
    """

    rank: int
    world: int
    uneven: bool
    anew: bool
    padding: PaddedSharding | None = None
    costs: Costs | None = None

    def count(self, length: int) -> int:
        """Return how many of ``length`` examples are this rank's in an epoch, with padding."""
        if self.padding is not None:
            return replace(self.padding, length=length).rows
        if self.uneven:
            return len(range(self.rank, length, self.world))
        return length // self.world

    def run(self, length: int, *, whole: bool) -> int:
        """Return the start of the rank's run of ``length``; ``whole``: no example is left over."""
        each, over = divmod(length, self.world)
        return self.rank * each + (min(self.rank, over) if whole else 0)


@dataclass(frozen=True)
class Cut:
    """The range of a row that ``.take()`` and ``.skip()`` leave.

    Attributes:
        start: the number of examples before it.
        stop: its end at the latest; None for the row's end.
    """

    start: int = 0
    stop: int | None = None

    def take(self, count: int) -> Cut:
        """Return the first ``count`` of this range."""
        return Cut(self.start, _least(self.stop, self.start + count))

    def skip(self, count: int) -> Cut:
        """Return this range without the first ``count``."""
        return Cut(self.start + count, self.stop)

    def count(self, length: int) -> int:
        """Return the length of this range in a row of ``length``."""
        return max(0, _least(self.stop, length) - self.start)


@dataclass(frozen=True)
class Selection:
    """The examples of an epoch on this rank, and their order.

    Attributes:
        is_shuffled: whether the order is drawn anew every epoch.
        share: this rank's part of the epoch; None for all of it.
        first: the cut of the source, before shuffling and sharding.
        between: the cut after one of shuffling and sharding.
        last: the cut after both.
        blocks: the ends of the blocks in the source, if the order is drawn by blocks.
        buffer: of a stream, how many examples are shuffled among each other; 1 keeps the order.
        chosen: the indices that ``.select()`` keeps, before all else; None for all.
        drawing: draws the order of an epoch by weights or a function; None for a permutation.
        leg: the rest of an epoch that other ranks began; None for a whole epoch.
    """

    is_shuffled: bool = False
    share: Share | None = None
    first: Cut = Cut()
    between: Cut = Cut()
    last: Cut = Cut()
    blocks: NDArray[np.int64] | None = field(default=None, compare=False)
    buffer: int = 1
    chosen: Subset | None = field(default=None, compare=False)
    drawing: OwnDrawing | WeightedDrawing | None = field(default=None, compare=False)
    leg: EpochRest | None = field(default=None, compare=False)

    @property
    def is_kept_by_streams(self) -> bool:
        """Whether the examples of a stream are handed out as they are read."""
        return not self.is_shuffled and (self.share is None or not self.share.uneven)

    def read_of_stream(self, drawn: int, buffer: int = 1) -> int:
        """Return how many examples of a stream are read when this rank has drawn so many.

        A rank reads those of all ranks. ``buffer``: as many are shuffled among each other.
        """
        if not drawn and self.leg is None:
            return 0
        share, begun = self.share, 0 if self.leg is None else self.leg.before.fresh_examples
        rows = drawn + buffer - 1
        if share is None:
            return self.first.start + begun + rows
        rows += 0 if share.anew else self.between.start
        return self.first.start + begun + rows * share.world

    def shuffle(self, blocks: NDArray[np.int64] | None = None, buffer: int = 1) -> Selection:
        """Return this with a new order every epoch; by blocks with these ends, or as a whole.

        Streams are shuffled through a buffer of so many examples.
        """
        return replace(self, is_shuffled=True, blocks=blocks, buffer=buffer)

    def select(self, chosen: Subset) -> Selection:
        """Return this for chosen indices, which are within the cut so far."""
        return replace(self, chosen=chosen, first=Cut())

    def draw(self, drawing: OwnDrawing | WeightedDrawing) -> Selection:
        """Return this with an order that weights or a function draw every epoch."""
        return replace(self, is_shuffled=True, drawing=drawing)

    @property
    def calls_user(self) -> bool:
        """Whether a user's function decides the order of an epoch."""
        return self.drawing is not None and self.drawing.calls_user

    def candidates(self, length: int) -> EligibleIndices:
        """Return the indices of a source of ``length`` that an epoch draws from."""
        count = self._count_chosen(length)
        start = min(self.first.start, count)
        return EligibleIndices(self.chosen, start, start + self.first.count(count))

    def _order_length(self, length: int) -> int:
        """Return the number of places in an order, over all ranks, before ``between``."""
        count = self.first.count(self._count_chosen(length))
        return count if self.drawing is None else self.drawing.count(count)

    def _count_chosen(self, length: int) -> int:
        return length if self.chosen is None else len(self.chosen)

    def of_all_ranks(self) -> Selection:
        """Return this for all ranks together."""
        leg = None if self.leg is None else replace(self.leg, world=1)
        return replace(self, share=None, leg=leg)

    def goes_through(self, ends: NDArray[np.int64]) -> bool:
        """Whether examples come a few blocks with these ends at a time, rather than at random."""
        if self.is_shuffled:
            by_these = self.blocks is not None and np.array_equal(self.blocks, ends)
            # By costs, a rank's part of a global batch depends on the examples in it.
            return by_these and (self.share is None or self.share.costs is None)
        return self.share is None

    def shard(self, rank: int, world: int, *, uneven: bool) -> Selection:
        """Return this with a rank's part of it."""
        return replace(self, share=Share(rank, world, uneven, self.is_shuffled))

    def balance(self, costs: Costs) -> Selection:
        """Return this with each global batch dealt by the costs of examples."""
        assert self.share is not None
        return replace(self, share=replace(self.share, costs=costs))

    def pad(self, *, fills: bool) -> Selection:
        """Return this with padding, up to the batch size of ``in_batches``."""
        assert self.share is not None
        deal = PaddedSharding(self.share.rank, self.share.world, fills=fills)
        return replace(self, share=replace(self.share, padding=deal))

    def in_batches(self, group: int) -> Selection:
        """Return this with ``group`` examples in a rank's batch."""
        if self.share is None or self.share.padding is None:
            return self
        deal = replace(self.share.padding, each=group)
        return replace(self, share=replace(self.share, padding=deal))

    def take(self, count: int) -> Selection:
        """Return the first ``count`` examples of this."""
        return self._cut(lambda cut: cut.take(count))

    def skip(self, count: int) -> Selection:
        """Return this without the first ``count`` examples."""
        return self._cut(lambda cut: cut.skip(count))

    def _cut(self, change: Callable[[Cut], Cut]) -> Selection:
        """Return this with a change of its latest cut."""
        if self.share is not None and self.is_shuffled:
            return replace(self, last=change(self.last))
        if self.share is not None or self.is_shuffled:
            return replace(self, between=change(self.between))
        return replace(self, first=change(self.first))

    def count(self, length: int) -> int:
        """Return this rank's number of examples in an epoch, or in its leg."""
        share, count = self.share, self._order_length(length)
        if self.leg is not None:
            rest = len(self.leg.rest)
            return self.leg.head_each + (rest if share is None else share.count(rest))
        if share is not None and not share.anew:
            count = share.count(count)
        count = self.between.count(count)
        if share is not None and share.anew:
            count = share.count(count)
        return self.last.count(count)

    def places(self, length: int) -> int:
        """Return the number of places in an epoch over a source of ``length``, over all ranks."""
        share, count = self.share, self._order_length(length)
        if share is not None and not share.anew and share.padding is None and self.leg is None:
            return share.world * self.between.count(share.count(count))
        return self.between.count(count)

    @property
    def has_runs(self) -> bool:
        """Whether each rank reads a run of the epoch; otherwise ranks take turns."""
        share = self.share
        if self.blocks is None or share is None:
            return False
        return share.anew and share.costs is None

    def rank_order(self, length: int, seed: int, epoch: int, group: int = 1) -> EpochIndices:
        """Return the order of one epoch over a source of ``length`` as this rank reads it.

        ``group``: examples in a rank's batch, where each global batch is dealt by their costs.
        """
        order, count = self.order(length, seed, epoch), self.count(length)
        share, start, leg = self.share, self.last.start, self.leg
        if share is not None and share.padding is not None:
            order = RepeatedEnd(order)
        if leg is None:
            deal = self._deal(order, self.places(length), group, start + count)
            return EpochIndices(order, deal, count, start)
        left, count = RestOrder(order, leg.rest), count - leg.head_each
        deal = self._deal(left, len(left), group, count)
        rows = EpochIndices(order, RestSharding.of(deal, leg.rest), count)
        head = leg.head_of(0 if share is None else share.rank)
        return (
            EpochIndices(order, CarriedSharding(head, rows), len(head) + count)
            if len(head)
            else rows
        )

    def _deal(self, order: Order, length: int, group: int, count: int) -> Sharding:
        """Return the deal of ``length`` places in this order."""
        share = self.share
        if share is None:
            return StridedSharding()
        if share.padding is not None:
            return replace(share.padding, length=length)
        if share.costs is not None:
            return BalancedSharding(order, share.costs, share.rank, share.world, group, count)
        if self.has_runs:
            return StridedSharding(share.run(length, whole=share.uneven))
        return StridedSharding(share.rank, share.world)

    def order(self, length: int, seed: int, epoch: int, purpose: int = rng.SHUFFLE) -> Order:
        """Return the order of one epoch before it is dealt; of a fixed part, its rank's order.

        ``purpose`` keys the draws of the parts of a mixture.
        """
        if self.drawing is not None:
            drawn = self.drawing.order(self.candidates(length), length, seed, epoch, purpose)
            before = self.between.start
            return CutOrder(drawn, before) if before else drawn
        share = self.share
        is_as_it_lies = not self.is_shuffled and (share is None or share.padding is not None)
        if self.chosen is not None and is_as_it_lies:  # 20 times as fast for neighbours
            whole = self.candidates(length)
            return replace(whole, start=min(whole.start + self.between.start, whole.stop))
        order = self._order_of_places(length, seed, epoch, purpose)
        return order if self.chosen is None else SubsetOrder(order, self.chosen)

    def _order_of_places(self, length: int, seed: int, epoch: int, purpose: int) -> Order:
        """Return the order of an epoch as places among the chosen examples."""
        begins, length = self.first.start, len(self.candidates(length))
        share, before = self.share, self.between.start
        if share is None or share.anew or share.padding is not None:
            key = rng.key(seed, epoch, purpose) if self.is_shuffled else None
            order = self._permutation(begins, length, key)
            return CutOrder(order, before, begins) if before or begins else order
        if self.leg is not None:  # fixed parts have legs only if they are not shuffled
            return FixedParts(length, self.leg.begun_by, epoch, begins)
        rank, world = share.rank, share.world
        key = rng.key(seed, epoch, purpose, rank) if self.is_shuffled else None
        own = self.between.count(share.count(length))
        most = len(range(rank, length, world)) - before
        is_to_the_end = before + own == share.count(length)
        # Epoch 0 leaves out the last one, so that an epoch in order of the data is so on all ranks.
        left_out = own - epoch % most if is_to_the_end and most > own else None
        if self.blocks is None or key is None:
            part = permutation(own, key)
            return FixedPart(part, world, begins + rank + before * world, world, left_out)
        start = begins + share.run(length, whole=True) + before
        return FixedPart(self._permutation(start, own, key), world, start, 1, left_out)

    def _permutation(self, first: int, length: int, key: NDArray[np.uint64] | None) -> Order:
        """Return a permutation of examples ``first ...``; by blocks if there are any.

        A few blocks, as many as a window has, need no order of their own.
        """
        if self.blocks is not None and key is not None:
            ends = self.blocks if self.chosen is None else self.chosen.count_below(self.blocks)
            ends = cut_to(ends, first, length)
            if len(ends) > WINDOW:
                return BlockOrder(ends, key)
        return permutation(length, key)


def _least(limit: int | None, count: int) -> int:
    return count if limit is None else min(limit, count)
