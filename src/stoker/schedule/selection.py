"""Which examples an epoch has on a rank: chosen, shuffled, shared out, cut short.

All of it counts the chosen examples alone, from 0 on; only at last their places become numbers of
the source. What is drawn by weights, or by a user's function, is numbers of the source at once.

With ``.shuffle().shard()`` ranks take turns at the places of a permutation of all examples. With
``.shard().shuffle()`` a rank reads a permutation of its own, fixed part. With
``.shuffle().shard(near=...)`` it reads what ``OwnerDeal`` gives it of each ``world * batch``
places; with ``.shard(balance=...)`` what ``BalancedDeal`` does. With ``.shard(pad=True)`` it reads
a run of these, and the last example again where there are none. Where a permutation is by blocks, a
rank's part is a run of it, so that ranks read different blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from stoker.schedule import rng
from stoker.schedule.dealing import (
    Deal,
    Dealer,
    HeldDeal,
    LegDeal,
    OwnerDeal,
    PaddedDeal,
    RankOrder,
    Stride,
)
from stoker.schedule.leg import Leg, LegOrder
from stoker.schedule.orders.blocks import WINDOW, BlockOrder, cut_to
from stoker.schedule.orders.chosen import Candidates, Chosen, ChosenOrder
from stoker.schedule.orders.drawing import Drawing, DrawnOrder
from stoker.schedule.orders.order import Order
from stoker.schedule.orders.permutation import permutation
from stoker.schedule.orders.plain import CutOrder, FixedPart, FixedParts, RepeatedEnd
from stoker.schedule.sizing.balanced_deal import BalancedDeal
from stoker.schedule.sizing.costs import Costs


@dataclass(frozen=True)
class Share:
    """Which part of an epoch is this process's.

    Attributes:
        rank, world: this process among so many.
        uneven: whether all examples are kept, so that parts may differ by one in length.
        anew: whether parts are drawn anew every epoch, rather than fixed.
        is_dealt: whether they are dealt inside the global batch, by who keeps what.
        padding: how they are dealt with padding, so that equal parts hold all examples.
        costs: what examples cost, where they are dealt inside the global batch for equal work.
    """

    rank: int
    world: int
    uneven: bool
    anew: bool
    is_dealt: bool = False
    padding: PaddedDeal | None = None
    costs: Costs | None = None

    @property
    def mixes_ranks(self) -> bool:
        """Whether what a rank gets of a global batch depends on what is in it."""
        return self.is_dealt or self.costs is not None

    def count(self, length: int) -> int:
        """Return how many of so many examples are this rank's in an epoch, with padding."""
        if self.padding is not None:
            return replace(self.padding, length=length).rows
        if self.uneven:
            return len(range(self.rank, length, self.world))
        return length // self.world

    def run(self, length: int, *, whole: bool) -> int:
        """Return where a rank's run of so many begins, all of them shared out or equal runs."""
        each, over = divmod(length, self.world)
        return self.rank * each + (min(self.rank, over) if whole else 0)


@dataclass(frozen=True)
class Cut:
    """Those of a row that ``.take()`` and ``.skip()`` leave.

    Attributes:
        start: how many come before them.
        stop: where they end at the latest, None for the row's end.
    """

    start: int = 0
    stop: int | None = None

    def take(self, count: int) -> Cut:
        """Return the first ``count`` of these."""
        return Cut(self.start, _least(self.stop, self.start + count))

    def skip(self, count: int) -> Cut:
        """Return these without the first ``count``."""
        return Cut(self.start + count, self.stop)

    def count(self, length: int) -> int:
        """Return how many they are in a row of so many."""
        return max(0, _least(self.stop, length) - self.start)


@dataclass(frozen=True)
class Selection:
    """Which examples an epoch has on this rank, and in what order: shuffled, shared out, cut short.

    Attributes:
        is_shuffled: whether the order is drawn anew every epoch.
        share: which part of the epoch is this rank's, None for all of it.
        first: which examples of the source there are, before all else.
        between: which of them behind the first of shuffling and sharing out.
        last: which of them behind both.
        blocks: where the order is drawn by blocks, their ends in the source.
        in_step: whether ranks must have the same part of a mixture at the same time.
        chosen: the numbers of the source that there are, before all else; None for all.
        drawing: draws the order of an epoch, where a permutation does not.
        leg: what is left of the epoch, where other ranks began it; None for all of it.
    """

    is_shuffled: bool = False
    share: Share | None = None
    first: Cut = Cut()
    between: Cut = Cut()
    last: Cut = Cut()
    blocks: NDArray[np.int64] | None = field(default=None, compare=False)
    in_step: bool = False
    chosen: Chosen | None = field(default=None, compare=False)
    drawing: Drawing | None = field(default=None, compare=False)
    leg: Leg | None = field(default=None, compare=False)

    @property
    def is_kept_by_streams(self) -> bool:
        """Whether the examples of a stream are handed out as they are read."""
        return not self.is_shuffled and self.share is None

    def shuffle(self, blocks: NDArray[np.int64] | None = None) -> Selection:
        """Return this, drawn anew every epoch; by blocks with these ends, or as a whole."""
        return replace(self, is_shuffled=True, blocks=blocks)

    def select(self, chosen: Chosen) -> Selection:
        """Return this of chosen numbers, all of which it had: nothing is cut off any more."""
        return replace(self, chosen=chosen, first=Cut())

    def draw(self, drawing: Drawing) -> Selection:
        """Return this in an order that is drawn anew every epoch, by weights or a function."""
        return replace(self, is_shuffled=True, drawing=drawing)

    @property
    def calls_user(self) -> bool:
        """Whether a user's function decides the order of an epoch."""
        return self.drawing is not None and self.drawing.calls_user

    def candidates(self, length: int) -> Candidates:
        """Return the numbers of a source of ``length`` that an epoch chooses from."""
        count = self._count_chosen(length)
        start = min(self.first.start, count)
        return Candidates(self.chosen, start, start + self.first.count(count))

    def _order_length(self, length: int) -> int:
        """Return how many places an order has, over all ranks, before it is cut."""
        count = self.first.count(self._count_chosen(length))
        return count if self.drawing is None else self.drawing.count(count)

    def _count_chosen(self, length: int) -> int:
        return length if self.chosen is None else len(self.chosen)

    @property
    def is_dealt(self) -> bool:
        """Whether ranks' parts are dealt by who keeps what."""
        return self.share is not None and self.share.is_dealt

    def of_all_ranks(self) -> Selection:
        """Return this for all ranks together."""
        return replace(self, share=None, in_step=False)

    def goes_through(self, ends: NDArray[np.int64]) -> bool:
        """Whether examples come block by block, or few blocks at a time, of blocks with these ends.

        Otherwise those of any block come at any time.
        """
        if self.is_shuffled:
            by_these = self.blocks is not None and np.array_equal(self.blocks, ends)
            return by_these and not (self.share is not None and self.share.mixes_ranks)
        return self.share is None

    def shard(
        self,
        rank: int,
        world: int,
        *,
        uneven: bool,
        by_owner: bool = False,
        costs: Costs | None = None,
    ) -> Selection:
        """Return a rank's part of this."""
        share = Share(rank, world, uneven, self.is_shuffled, by_owner, costs=costs)
        return replace(self, share=share)

    def pad(self, *, fills: bool) -> Selection:
        """Return this with padding, up to the size of batches that ``in_batches`` says."""
        assert self.share is not None
        deal = PaddedDeal(self.share.rank, self.share.world, fills=fills)
        return replace(self, share=replace(self.share, padding=deal))

    def in_batches(self, group: int) -> Selection:
        """Return this where a rank's batches have so many examples."""
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
        """Return this with a change of the last of its cuts."""
        if self.share is not None and self.is_shuffled:
            return replace(self, last=change(self.last))
        if self.share is not None or self.is_shuffled:
            return replace(self, between=change(self.between))
        return replace(self, first=change(self.first))

    def count(self, length: int) -> int:
        """Return the examples of an epoch, or of its leg, over a source of ``length``."""
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
        """Return how many places an epoch over a source of ``length`` has, over all ranks."""
        share, count = self.share, self._order_length(length)
        if share is not None and not share.anew and share.padding is None:
            world = share.world if self.leg is None else self.leg.begun_by
            return world * self.between.count(replace(share, world=world).count(count))
        return self.between.count(count)

    @property
    def has_runs(self) -> bool:
        """Whether each rank has a run of the epoch, and they do not take turns at it."""
        share = self.share
        if self.blocks is None or share is None:
            return False
        return share.anew and not share.is_dealt and share.costs is None

    def rank_order(
        self, length: int, seed: int, epoch: int, dealer: Dealer | None = None, group: int = 1
    ) -> RankOrder:
        """Return the order of one epoch over a source of ``length`` as this rank reads it.

        What is dealt is so by the owners of ``dealer``, ``group`` examples to a rank at a time.
        """
        draw_order = self._draw_order(length, seed, epoch, rng.SHUFFLE)
        order = self._order(length, seed, epoch, rng.SHUFFLE, draw_order)
        rank_order = self._of_rank(order, length, dealer, group)
        if draw_order is not None:
            rank_order.digest = draw_order.digest
        return rank_order

    def _of_rank(self, order: Order, length: int, dealer: Dealer | None, group: int) -> RankOrder:
        count = self.count(length)
        share, start, leg = self.share, self.last.start, self.leg
        if share is not None and share.padding is not None:
            order = RepeatedEnd(order)
        if leg is None:
            deal = self._deal(order, self.places(length), dealer, group, start + count)
            return RankOrder(order, deal, count, start)
        left, count = LegOrder(order, leg.rest), count - leg.head_each
        deal = self._deal(left, len(left), dealer, group, count)
        rows = RankOrder(order, LegDeal.of(deal, leg.rest), count)
        head = leg.head_of(0 if share is None else share.rank)
        return RankOrder(order, HeldDeal(head, rows), len(head) + count) if len(head) else rows

    def _deal(
        self, order: Order, length: int, dealer: Dealer | None, group: int, count: int
    ) -> Deal:
        """Return which of ``length`` places, that have this order, are the rows of this rank."""
        share = self.share
        if share is None:
            return Stride()
        if share.padding is not None:
            return replace(share.padding, length=length)
        if share.is_dealt:
            assert dealer is not None
            return OwnerDeal(order, dealer, share.rank, group, count)
        if share.costs is not None:
            return BalancedDeal(order, share.costs, share.rank, share.world, group, count)
        if self.has_runs:
            return Stride(share.run(length, whole=share.uneven))
        return Stride(share.rank, share.world)

    def order(self, length: int, seed: int, epoch: int, purpose: int = rng.SHUFFLE) -> Order:
        """Return the order of one epoch, before it is dealt: of a fixed part, that of its rank.

        ``purpose`` tells the draws of the parts of a mixture apart.
        """
        return self._order(
            length, seed, epoch, purpose, self._draw_order(length, seed, epoch, purpose)
        )

    def _draw_order(self, length: int, seed: int, epoch: int, purpose: int) -> DrawnOrder | None:
        """Return the whole order of an epoch that is not a permutation."""
        if self.drawing is None:
            return None
        return self.drawing.order(self.candidates(length), length, seed, epoch, purpose)

    def _order(
        self, length: int, seed: int, epoch: int, purpose: int, draw_order: DrawnOrder | None
    ) -> Order:
        if draw_order is not None:
            before = self.between.start
            return CutOrder(draw_order, before) if before else draw_order
        share = self.share
        is_as_it_lies = not self.is_shuffled and (share is None or share.padding is not None)
        if self.chosen is not None and is_as_it_lies:  # neighbours are found 20 times as fast
            whole = self.candidates(length)
            return replace(whole, start=min(whole.start + self.between.start, whole.stop))
        order = self._order_of_places(length, seed, epoch, purpose)
        return order if self.chosen is None else ChosenOrder(order, self.chosen)

    def _order_of_places(self, length: int, seed: int, epoch: int, purpose: int) -> Order:
        """Return the order of an epoch as places among the chosen examples."""
        begins, length = self.first.start, len(self.candidates(length))
        share, before = self.share, self.between.start
        if share is None or share.anew or share.padding is not None:
            key = rng.key(seed, epoch, purpose) if self.is_shuffled else None
            order = self._permutation(begins, length, key)
            return CutOrder(order, before, begins) if before or begins else order
        if self.leg is not None:  # only of what is not shuffled
            return FixedParts(length, self.leg.begun_by, epoch, begins)
        rank, world = share.rank, share.world
        key = rng.key(seed, epoch, purpose, rank) if self.is_shuffled else None
        own = self.between.count(share.count(length))
        most = len(range(rank, length, world)) - before
        is_to_the_end = before + own == share.count(length)
        # The last one first: an epoch 0 in the order of the data is so on all ranks.
        left_out = own - epoch % most if is_to_the_end and most > own else None
        if self.blocks is None or key is None:
            part = permutation(own, key)
            return FixedPart(part, world, begins + rank + before * world, world, left_out)
        start = begins + share.run(length, whole=True) + before
        return FixedPart(self._permutation(start, own, key), world, start, 1, left_out)

    def _permutation(self, first: int, length: int, key: NDArray[np.uint64] | None) -> Order:
        """Return a permutation of examples ``first ...``, from 0 on; by blocks if there are some.

        No more blocks than are drawn from at a time need no order of their own.
        """
        if self.blocks is not None and key is not None:
            ends = self.blocks if self.chosen is None else self.chosen.count_below(self.blocks)
            ends = cut_to(ends, first, length)
            if len(ends) > WINDOW:
                return BlockOrder(ends, key)
        return permutation(length, key)


def _least(limit: int | None, count: int) -> int:
    return count if limit is None else min(limit, count)
