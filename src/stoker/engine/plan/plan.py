"""The plan of a chain: its source and order, and the parts that an epoch's streams are built from.

A plan is made once for a chain, and shared by its epochs: nothing in it changes when they run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from stoker.engine.plan.address import WorkAddress
from stoker.engine.plan.points import OwnPoint, Part
from stoker.engine.plan.segment import Segment
from stoker.schedule.batch_bounds import PlannedBounds
from stoker.schedule.batch_plan import BatchRule, PlannedSharding
from stoker.schedule.epoch_rest import EpochRest
from stoker.schedule.progress import Pace
from stoker.schedule.selection import Selection
from stoker.schedule.sharding import EpochIndices
from stoker.sources.origin import IndexedSource, SourceBase
from stoker.stages.cache import CacheStage
from stoker.stages.map import Map


@dataclass(frozen=True)
class Plan:
    """The plan by which the engine runs a chain.

    Attributes:
        indexed: the source, if its examples are read by number; else None.
        iterated: the source, a ``HeadSource`` (``engine/stream_stage.py``); else None.
        selection: the examples of an epoch, and their order.
        parts: in the order that data meets them; none for a bare loader. A segment stands first
            unless a loader does, and behind every filter point and pool, but that a pool may follow
            a filter point or the way to a device.
        group: the number of examples in a batch, 1 where examples are never batched.
        mask: the field of batches that tells what of them is padding, if they have one.
        batches: how batches are planned; None where they are not.
    """

    indexed: IndexedSource | None
    iterated: Any
    selection: Selection
    parts: tuple[Part, ...]
    group: int
    mask: str | None = None
    batches: BatchRule | None = None
    _planned: dict[tuple[int, int], EpochIndices] = field(default_factory=dict, compare=False)

    def on_leg(self, leg: EpochRest) -> Plan:
        """Return this for the rest of an epoch."""
        return replace(self, selection=replace(self.selection, leg=leg), _planned={})

    @property
    def source(self) -> SourceBase:
        source: SourceBase = self.iterated if self.indexed is None else self.indexed
        return source

    def order(self, seed: int, epoch: int) -> EpochIndices:
        """Return the order of an epoch of an indexed source, as this rank reads it.

        Batches that are planned are planned now; the plan of the last epoch is kept, unless a
        user's function says the order: that is called for each epoch anew.

        Raises ValueError where an example is larger than a planned batch may be.
        """
        assert self.indexed is not None
        if self.batches is None:
            return self.indexed.order(self.selection, seed, epoch, self.group)
        if self.selection.calls_user:
            self._planned.clear()
        return self._by_rule(self.batches, seed, epoch)

    def order_digest(self, seed: int, epoch: int) -> str:
        """Return the digest of the order of an epoch that a user's function decides; else "".

        Calls the function. Raises StageError if it fails.
        """
        if self.indexed is None or not self.calls_user:
            return ""
        return self.indexed.order(self.selection, seed, epoch, self.group).digest

    def has_planned(self, seed: int, epoch: int) -> bool:
        """Whether the plan of an epoch's batches is kept."""
        return (seed, epoch) in self._planned

    def cuts(self, seed: int, epoch: int) -> PlannedBounds:
        """Return the batches of an epoch, where they are planned; raises as ``order`` does."""
        return self.planned_deal(seed, epoch).cuts

    def planned_deal(self, seed: int, epoch: int) -> PlannedSharding:
        """Return the deal of an epoch whose batches are planned."""
        assert self.batches is not None
        deal = self._by_rule(self.batches, seed, epoch).deal
        assert isinstance(deal, PlannedSharding)
        return deal

    @property
    def row(self) -> Selection:
        """The selection whose places are dealt to ranks; planned batches deal those of all."""
        return self.selection if self.batches is None else self.selection.of_all_ranks()

    def forget_planned(self) -> None:
        """Drop the plan of an epoch whose order a user's function decides: it is called again."""
        if self.calls_user:
            self._planned.clear()

    def _by_rule(self, rule: BatchRule, seed: int, epoch: int) -> EpochIndices:
        assert self.indexed is not None
        known = self._planned.get((seed, epoch))
        if known is not None:
            return known
        whole = self.indexed.order(self.row, seed, epoch)
        share = self.selection.share
        rank, world = (0, 1) if share is None else (share.rank, share.world)
        leg, parts = self.selection.leg, self.indexed.parts_count
        first = 0 if leg is None else leg.rest.first or 0
        deal = PlannedSharding(whole, rule, seed, epoch, rank, world, parts, first)
        order = EpochIndices(whole.order, deal, deal.cuts.examples)
        order.digest = whole.digest
        self._planned.clear()
        self._planned[seed, epoch] = order
        return order

    def address(self, at: int, seed: int, epoch: int) -> WorkAddress:
        """Return the address of a part, by its position among the parts, in an epoch."""
        share, leg = self.selection.share, self.selection.leg
        rank, world = (0, 1) if share is None else (share.rank, share.world)
        paces: tuple[Pace, ...] = ()
        if self.indexed is not None and any(stage.progress for stage in self.maps):
            paces = self.indexed.paces(self.selection, epoch)
        return WorkAddress(at, seed, epoch, rank, world, 0 if leg is None else leg.batches, paces)

    @property
    def calls_user(self) -> bool:
        """Whether a user's function decides the order of an epoch."""
        by_source = self.indexed is not None and self.indexed.changes_shares
        return self.selection.calls_user or by_source

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments among the parts."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    def uses_behind(self, segment: Segment) -> float:
        """Return how often an output of a segment is used, by a fixed factor behind it."""
        counts = None if self.pool is None else self.pool.stage.counts
        if self.pool is None or counts is None or self.pool.at < segment.at:
            return 1.0
        return float(counts.factor)

    @cached_property
    def pool(self) -> OwnPoint | None:
        """The echo among the parts."""
        own = (part for part in self.parts if isinstance(part, OwnPoint))
        return next((part for part in own if part.stage.traits.repeats), None)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of nodes in a state, in the order of their parts."""
        return tuple(part.kind for part in self.parts if part.kind is not None)

    @property
    def is_decided(self) -> bool:
        """Whether the number of items depends on values: filters, budgets, packing and scans."""
        return any(part.is_decided for part in self.parts)

    @property
    def has_filter(self) -> bool:
        """Whether a filter is in the chain."""
        return any(segment.has_filter for segment in self.segments)

    @property
    def maps(self) -> list[Map]:
        """All maps, in order."""
        each = [stage for part in self.segments for stage in (*part.operations, *part.batch_maps)]
        return [stage for stage in each if isinstance(stage, Map)]

    @property
    def cache(self) -> CacheStage | None:
        """The cache, if there is one."""
        return next((part.cache for part in self.segments if part.cache is not None), None)

    @property
    def is_adaptive(self) -> bool:
        """Whether its echo is adaptive, or replays the record of an adaptive one."""
        return self.pool is not None and bool(self.pool.stage.is_adaptive)

    @property
    def carries_pool(self) -> bool:
        """Whether a pool may go on in the next epoch: whatever is in it can be made again there.

        That is so for an echo that follows the stall, right behind the first segment, if
        nothing can be left out, so that all epochs have equally many items; and if the next epoch
        knows the order of this one, which it does not where a user's function says it; nor have
        epochs whose batches are planned equally many.
        """
        point = self.pool
        if self.indexed is None or point is None or self.kinds != (point.kind,):
            return False
        if self.selection.calls_user or self.batches is not None:
            return False
        return bool(point.stage.is_adaptive) and not point.on_device

    def items_of_first(self, examples: int) -> int:
        """Return how many outputs the first segment makes of ``examples`` examples."""
        batch = self.segments[0].batch
        return examples if batch is None else batch.count(examples)
