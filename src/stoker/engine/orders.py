"""``Orders``: which examples each epoch of a chain has, and in what order, on integers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stoker.engine.work.step import WorkAddress
from stoker.schedule.batch_bounds import PlannedBounds
from stoker.schedule.batch_plan import BatchRule, Planned, PlannedSharding
from stoker.schedule.packing import PackedSharding, PackRule
from stoker.schedule.progress import Pace
from stoker.schedule.selection import Selection
from stoker.schedule.sharding import EpochIndices
from stoker.sources.origin import IndexedSource


@dataclass(frozen=True)
class Orders:
    """Which examples each epoch has, and in what order, as this rank reads them.

    Attributes:
        source: the source, if its examples are read by number; else None.
        selection: the examples of an epoch, and their order.
        group: the number of examples in a batch, 1 where examples are never batched.
        rule: how batches, or packed sequences, are planned; None where they are not.
    """

    source: IndexedSource | None
    selection: Selection
    group: int
    rule: BatchRule | PackRule | None = None
    _planned: dict[tuple[int, int], EpochIndices] = field(default_factory=dict, compare=False)

    @property
    def row(self) -> Selection:
        """The selection whose places are dealt to ranks; planned batches deal those of all.

        Sequences are planned for the whole epoch, on every leg of it.
        """
        row = self.selection if self.rule is None else self.selection.of_all_ranks()
        return replace(row, leg=None) if self.packs else row

    @property
    def packs(self) -> bool:
        """Whether packed sequences are planned."""
        return isinstance(self.rule, PackRule)

    @property
    def calls_user(self) -> bool:
        """Whether a user's function decides the order of an epoch."""
        by_source = self.source is not None and self.source.changes_shares
        return self.selection.calls_user or by_source

    def order(self, seed: int, epoch: int) -> EpochIndices:
        """Return the order of an epoch of an indexed source, as this rank reads it.

        Batches that are planned are planned now; the plan of the last epoch is kept, unless a
        user's function says the order: that is called for each epoch anew.

        Raises ValueError where an example is larger than a planned batch may be.
        """
        assert self.source is not None
        if self.rule is None:
            return self.source.order(self.selection, seed, epoch, self.group)
        if self.selection.calls_user:
            self._planned.clear()
        return self._by_rule(self.rule, seed, epoch)

    def digest(self, seed: int, epoch: int) -> str:
        """Return the digest of the order of an epoch that a user's function decides; else "".

        Calls the function. Raises StageError if it fails.
        """
        if self.source is None or not self.calls_user:
            return ""
        return self.source.order(self.selection, seed, epoch, self.group).digest

    def has_planned(self, seed: int, epoch: int) -> bool:
        """Whether the plan of an epoch's batches is kept."""
        return (seed, epoch) in self._planned

    def cuts(self, seed: int, epoch: int) -> PlannedBounds:
        """Return the batches of an epoch, where they are planned; raises as ``order`` does."""
        return self.planned_deal(seed, epoch).cuts

    def planned_deal(self, seed: int, epoch: int) -> Planned:
        """Return the deal of an epoch whose batches are planned."""
        assert self.rule is not None
        deal = self._by_rule(self.rule, seed, epoch).deal
        assert isinstance(deal, Planned)
        return deal

    def forget_planned(self) -> None:
        """Drop the plan of an epoch whose order a user's function decides: it is called again."""
        if self.calls_user:
            self._planned.clear()

    def _by_rule(self, rule: BatchRule | PackRule, seed: int, epoch: int) -> EpochIndices:
        assert self.source is not None
        known = self._planned.get((seed, epoch))
        if known is not None:
            return known
        whole = self.source.order(self.row, seed, epoch)
        leg, parts = self.selection.leg, self.source.parts_count
        deal: Planned
        if isinstance(rule, PackRule):
            first = 0 if leg is None else leg.sequences
            deal = PackedSharding(whole, rule, *self._rank_world, self.group, parts, first)
        else:
            first = 0 if leg is None else leg.rest.first or 0
            deal = PlannedSharding(whole, rule, seed, epoch, *self._rank_world, parts, first)
        order = EpochIndices(whole.order, deal, deal.cuts.examples)
        order.digest = whole.digest
        self._planned.clear()
        self._planned[seed, epoch] = order
        return order

    @property
    def _rank_world(self) -> tuple[int, int]:
        share = self.selection.share
        return (0, 1) if share is None else (share.rank, share.world)

    def paces(self, epoch: int) -> Sequence[Pace]:
        """Return how examples come over an epoch, for maps that are told the time."""
        return () if self.source is None else self.source.paces(self.selection, epoch)

    def address(self, at: int, seed: int, epoch: int, paces: Sequence[Pace] = ()) -> WorkAddress:
        """Return the address of a layer of the flow in an epoch, by its place among the layers."""
        leg = self.selection.leg
        batches = 0 if leg is None else leg.batches
        return WorkAddress(at, seed, epoch, *self._rank_world, batches, tuple(paces))
