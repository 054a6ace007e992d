"""From a chain to what the engine runs: what lies between two pools is one segment of work.

``lower`` lets the source and then each stage say what they need, in terms of ``Lowering``. The
result is a ``Plan``: segments, and between them the points where items are kept, dropped, joined or
moved. Plans are made once for a chain and shared by its epochs; nothing in them changes when they
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.dealing import Dealer, RankOrder
from stoker.schedule.factor import UsesByPart
from stoker.schedule.leg import Leg
from stoker.schedule.orders.chosen import Chosen
from stoker.schedule.orders.drawing import Drawing
from stoker.schedule.selection import Selection
from stoker.schedule.sizing.batch_plan import BatchRule, PlannedDeal
from stoker.schedule.sizing.batch_schedule import BatchSchedule
from stoker.schedule.sizing.costs import Costs
from stoker.schedule.sizing.cuts import PlannedCuts
from stoker.sources.iterable import IterableSource
from stoker.sources.loader import LoaderSource
from stoker.sources.origin import IndexedSource, Origin, UserObject
from stoker.sources.source import Rows
from stoker.stages.batching.batch import Batch
from stoker.stages.batching.pack import Pack
from stoker.stages.batching.planned import PlannedBatch
from stoker.stages.cache import CacheStage
from stoker.stages.echo import Echo
from stoker.stages.filter import Filter
from stoker.stages.functions.operation import Operation
from stoker.stages.map import Map
from stoker.stages.scan import Scan
from stoker.stages.skip import RAISE, Budget
from stoker.stages.stage import ChainStage
from stoker.stages.to import To

Caller = TypeVar("Caller", bound=IndexedSource | ChainStage)


class WorkAddress(NamedTuple):
    """What tells a work from others of its pipeline.

    Attributes:
        at: its segment's place among the parts of the plan.
        seed, epoch: what its random draws are keyed by.
        rank, world: this process among those that share an epoch.
        batches: how many batches all ranks had of the epoch before its leg.
        places: how many places the epoch has, over all ranks, by part of a mixture; empty where no
            map asks for the time.
    """

    at: int
    seed: int
    epoch: int
    rank: int = 0
    world: int = 1
    batches: int = 0
    places: tuple[int, ...] = ()


@dataclass
class Segment:
    """Stages that run together: examples in, examples or batches out; or batches throughout.

    Attributes:
        source: the source, in the first segment of an indexed chain.
        operations: what is done to what comes in.
        cache: the cache among them, in front of operation number ``cache_at``.
        batch: the batching stage, if it is in this segment.
        batch_maps: the maps behind it.
        batches_in: whether what comes in are batches already.
        on_device: whether it comes after ``.to(device)``.
        at: its place among the parts.
        into_pool: whether a pool keeps what comes out.
        is_followed: whether that is the pool of an adaptive echo, on a device perhaps.
        renumbered: whether what comes in was joined before, and is numbered anew.
    """

    source: IndexedSource | None = None
    operations: list[Operation] = field(default_factory=list)
    cache: CacheStage | None = None
    cache_at: int = 0
    batch: Batch | None = None
    batch_maps: list[Map] = field(default_factory=list)
    batches_in: bool = False
    on_device: bool = False
    at: int = 0
    into_pool: bool = False
    is_followed: bool = False
    renumbered: bool = False
    kind = None
    needs_work_behind = False
    is_one_to_one = True

    @property
    def is_plain(self) -> bool:
        """Whether nothing happens to single inputs on their way."""
        return not self.operations and self.cache is None

    @property
    def has_filter(self) -> bool:
        """Whether some of what comes in may be left out by a filter."""
        return any(not operation.makes_values for operation in self.operations)

    @property
    def rows(self) -> Rows | None:
        """What gathers batches from arrays, where nothing is done to single examples."""
        if self.source is None or not self.only_stacks or isinstance(self.batch, PlannedBatch):
            return None
        return self.source.rows

    @property
    def releases_gil(self) -> bool:
        """Whether it is all image functions, but for what stoker itself does."""
        if self.is_plain or self.batch_maps or self.cache is not None:
            return False
        is_own = self.source is None or not self.source.runs_user_code
        collates = self.batch is not None and self.batch.collate is not None
        return is_own and not collates and all(each.releases_gil for each in self.operations)

    @property
    def stacks(self) -> bool:
        """Whether what comes out are copies, in the rows of a batch."""
        return self.batch is not None and self.batch.collate is None

    @property
    def only_stacks(self) -> bool:
        """Whether inputs are but copied into a batch."""
        return self.is_plain and self.stacks

    @cached_property
    def reads_what_is_cached(self) -> bool:
        """Whether examples from the cache are only read, by image functions, and then stacked."""
        behind = self.operations[self.cache_at :]
        return self.stacks and all(each.only_reads and each.releases_gil for each in behind)

    @cached_property
    def reading(self) -> int:
        """How many of the first operations only read what they are given."""
        return sum(1 for _ in takewhile(lambda each: each.only_reads, self.operations))

    @property
    def shares_items(self) -> bool:
        """Whether a pool lends it items: the first to get hold of them does not write."""
        return self.reading > 0 or self.only_stacks

    @property
    def names(self) -> list[str]:
        """The stages with a time of their own, in order."""
        names = [operation.name for operation in self.operations]
        if self.cache is not None:
            names.insert(self.cache_at, self.cache.name)
        if self.source is not None:
            names.insert(0, self.source.name)
        if self.batch is not None:
            names.append(self.batch.name)
        return names + [stage.name for stage in self.batch_maps]

    @property
    def callers(self) -> list[IndexedSource | ChainStage]:
        """What may call objects of the user's, in order."""
        each = [self.source, *self.operations, self.batch, *self.batch_maps]
        return [one for one in each if one is not None]

    @cached_property
    def user_objects(self) -> list[UserObject]:
        """The objects of the user's that it calls, in order."""
        return [each for one in self.callers for each in one.user_objects()]

    def with_user_objects(self, objects: Sequence[Any]) -> Segment:
        """Return it with others in their place."""
        rest = iter(objects)

        def copy_of(one: Caller) -> Caller:
            made: Any = one.with_user_objects([next(rest) for _ in one.user_objects()])
            twin: Caller = made
            return twin

        return replace(
            self,
            source=None if self.source is None else copy_of(self.source),
            operations=[copy_of(each) for each in self.operations],
            batch=None if self.batch is None else copy_of(self.batch),
            batch_maps=[copy_of(each) for each in self.batch_maps],
        )

    def parts(self) -> list[tuple[str, object]]:
        """Return the source and the stages, each by its name."""
        parts = [self.source, *self.operations, self.cache, self.batch, *self.batch_maps]
        return [(part.name, part) for part in parts if part is not None]

    def counters(self) -> list[int]:
        """Return zeros: nanoseconds in each stage, examples through each, ``TIMED``, bytes read."""
        return [0] * (2 * len(self.names) + 5)


@dataclass
class FilterPoint:
    """The point after a segment some of whose outputs do not survive.

    Attributes:
        budgets: the skip budgets, by account: 0 is the pipeline's, the others are those of stages
            that have one of their own.
        at: its place among the parts.
    """

    budgets: Mapping[int, Budget]
    at: int = 0
    kind = "filter"
    needs_work_behind = True
    is_one_to_one = True


@dataclass
class PackPoint:
    """The point where sequences are joined into full ones.

    Attributes:
        pack: the stage.
        at: its place among the parts.
    """

    pack: Pack
    at: int = 0
    kind = "pack"
    needs_work_behind = True
    is_one_to_one = False


@dataclass
class ScanPoint:
    """The point where a function with a state is called with one item after another.

    Attributes:
        scan: the stage.
        at: its place among the parts.
    """

    scan: Scan
    at: int = 0
    kind = "scan"
    needs_work_behind = True
    is_one_to_one = False


@dataclass
class EchoPoint:
    """A pool between two segments.

    Attributes:
        echo: the stage.
        holds_batches: whether its items are batches.
        on_device: whether it comes after ``.to(device)``.
        group: how many items a step of its pool has: one, where those are batches.
        leaks: whether uses may be left out behind it.
        at: its place among the parts.
    """

    echo: Echo
    holds_batches: bool
    on_device: bool
    group: int = 1
    leaks: bool = False
    at: int = 0
    kind = "echo"
    needs_work_behind = True
    is_one_to_one = True


@dataclass
class DevicePoint:
    """The point where batches move to a device.

    Attributes:
        to: the stage.
        at: its place among the parts.
    """

    to: To
    at: int = 0
    kind = None
    needs_work_behind = False
    is_one_to_one = True


Part = Segment | FilterPoint | PackPoint | ScanPoint | EchoPoint | DevicePoint
"""What a plan is made of. Each says its ``kind`` in a state, or None where nothing of it is kept
there; and whether each of its outputs ``is_one_to_one``: made of one input alone."""


@dataclass(frozen=True)
class Plan:
    """What the engine runs for a chain.

    Attributes:
        indexed, iterable, loader: the source, as the one of these that it is.
        selection: which examples an epoch has, and in what order.
        buffer: how many examples of a stream are shuffled among each other, 1 for none.
        parts: in the order that data meets them; none for a bare loader. A segment stands first
            unless a loader does, and behind every filter point and pool, but that a pool may follow
            a filter point or the way to a device.
        group: the number of examples in a batch, 1 where examples are never batched.
        mask: the field of batches that tells what of them is padding, if they have one.
        batches: how batches are planned: from sizes, or by a schedule; None where they are not.
    """

    indexed: IndexedSource | None
    iterable: IterableSource | None
    loader: LoaderSource | None
    selection: Selection
    buffer: int
    parts: tuple[Part, ...]
    group: int
    mask: str | None = None
    batches: BatchRule | BatchSchedule | None = None
    _planned: dict[tuple[int, int], RankOrder] = field(default_factory=dict, compare=False)
    _cuts: dict[int, PlannedCuts] = field(default_factory=dict, compare=False)

    def on_leg(self, leg: Leg) -> Plan:
        """Return this for what is left of an epoch."""
        return replace(self, selection=replace(self.selection, leg=leg), _planned={}, _cuts={})

    @property
    def source(self) -> Origin:
        source = self.indexed or self.iterable or self.loader
        assert source is not None
        return source

    def order(self, seed: int, epoch: int, dealer: Dealer | None = None) -> RankOrder:
        """Return the order of an epoch of an indexed source, as this rank reads it.

        Batches that are planned are planned now; the plan of the last epoch is kept, unless a
        user's function says the order: that is called for each epoch anew.

        Raises ValueError where an example is larger than a planned batch may be, StageError where
        the function that says their sizes fails.
        """
        assert self.indexed is not None
        match self.batches:
            case None:
                return self.indexed.order(self.selection, seed, epoch, dealer, self.group)
            case BatchSchedule():
                cuts = self.cuts(seed, epoch)
                order = self.indexed.order(self.selection, seed, epoch, dealer, cuts.unit)
                return order.taken(cuts.examples)
            case BatchRule():
                if self.selection.calls_user:
                    self._planned.clear()
                return self._by_rule(self.batches, seed, epoch)
            case _:
                assert_never(self.batches)

    def has_planned(self, seed: int, epoch: int) -> bool:
        """Whether the plan of an epoch is kept, or needs no order."""
        return isinstance(self.batches, BatchSchedule) or (seed, epoch) in self._planned

    def cuts(self, seed: int, epoch: int) -> PlannedCuts:
        """Return the batches of an epoch, where they are planned; raises as ``order`` does."""
        assert self.batches is not None
        if isinstance(self.batches, BatchRule):
            deal = self._by_rule(self.batches, seed, epoch).deal
            assert isinstance(deal, PlannedDeal)
            return deal.cuts
        known = self._cuts.get(epoch)
        if known is None:
            assert self.indexed is not None
            share, leg = self.selection.share, self.selection.leg
            rows, places = (
                self.indexed.examples(self.selection),
                self.indexed.places(self.selection),
            )
            begun = 0 if leg is None else places - len(leg.rest) - len(leg.returned)
            world = 1 if share is None else share.world
            known = self.batches.cuts(epoch, rows, world, begun, places)
            self._cuts.clear()
            self._cuts[epoch] = known
        return known

    def _by_rule(self, rule: BatchRule, seed: int, epoch: int) -> RankOrder:
        assert self.indexed is not None
        known = self._planned.get((seed, epoch))
        if known is not None:
            return known
        whole = self.indexed.order(self.selection.undealt(), seed, epoch)
        share = self.selection.share
        rank, world = (0, 1) if share is None else (share.rank, share.world)
        deal = PlannedDeal(whole, rule, seed, epoch, rank, world, self.indexed.parts_count)
        order = RankOrder(whole.order, deal, deal.cuts.examples)
        order.digest = whole.digest
        self._planned.clear()
        self._planned[seed, epoch] = order
        return order

    def address(self, at: int, seed: int, epoch: int) -> WorkAddress:
        """Return the address of the segment at a place among the parts, in an epoch."""
        share, leg = self.selection.share, self.selection.leg
        rank, world = (0, 1) if share is None else (share.rank, share.world)
        places: tuple[int, ...] = ()
        if self.indexed is not None and any(stage.clock for stage in self.maps):
            places = self.indexed.places_by_part(self.selection)
        batches = 0 if leg is None else leg.batches
        return WorkAddress(at, seed, epoch, rank, world, batches, places)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments among the parts."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    @cached_property
    def echoes(self) -> tuple[EchoPoint, ...]:
        """The pools among the parts."""
        return tuple(part for part in self.parts if isinstance(part, EchoPoint))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of nodes in a state, in the order of their parts."""
        return tuple(part.kind for part in self.parts if part.kind is not None)

    @property
    def packs(self) -> bool:
        """Whether sequences are joined."""
        return PackPoint.kind in self.kinds

    @property
    def scans(self) -> bool:
        """Whether there is a scan."""
        return ScanPoint.kind in self.kinds

    @property
    def is_decided(self) -> bool:
        """Whether values decide how many items there are: filters, budgets, packs and scans."""
        return any(kind != EchoPoint.kind for kind in self.kinds)

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
    def random_maps(self) -> list[Map]:
        """The maps that draw, by their positions."""
        return [stage for stage in self.maps if stage.is_random]

    @property
    def cache(self) -> CacheStage | None:
        """The cache, if there is one."""
        return next((part.cache for part in self.segments if part.cache is not None), None)

    @property
    def is_adaptive(self) -> bool:
        """Whether the factor of an echo follows the stall, now or in the run that it replays."""
        return any(point.echo.is_adaptive for point in self.echoes)

    @property
    def carries_pool(self) -> bool:
        """Whether a pool may go on in the next epoch: whatever is in it can be made again there.

        That is so for a single echo that follows the stall, right behind the first segment, if
        nothing can be left out, so that all epochs have equally many items; and if the next epoch
        knows the order of this one, which it does not where this one's owners deal it, or a user's
        function says it; nor have epochs whose batches are planned equally many.
        """
        if self.indexed is None or self.is_decided or len(self.echoes) != 1:
            return False
        if self.selection.is_dealt or self.selection.calls_user or self.batches is not None:
            return False
        point = self.echoes[0]
        return point.echo.is_adaptive and not point.on_device and not point.leaks

    def items_of_first(self, examples: int) -> int:
        """Return how many outputs the first segment makes of so many examples."""
        batch = self.segments[0].batch
        return examples if batch is None else batch.count(examples)


def lower(source: Origin, stages: Sequence[ChainStage], budget: Budget) -> Plan:
    """Return the plan of a chain; ``budget`` is the pipeline's own for skipping examples."""
    lowering = Lowering(budget)
    source.lower(lowering)
    for stage in stages:
        stage.lower(lowering)
    return lowering.plan()


class Lowering:
    """Collects what a chain needs from the engine, in order, as the parts of a plan.

    The source calls one of the first three methods, then each stage one of the others.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._indexed: IndexedSource | None = None
        self._iterable: IterableSource | None = None
        self._loader: LoaderSource | None = None
        self._selection = Selection()
        self._buffer = 1
        self._parts: list[Part] = []
        self._segment: Segment | None = None  # the one at hand
        self._on_device = False
        self._renumbered = False
        self._group = 1
        self._mask: str | None = None
        self._rule: BatchRule | BatchSchedule | None = None
        self._batches = False  # whether what comes by are batches

    def read(self, source: IndexedSource) -> None:
        """Examples are read by number."""
        self._indexed = source
        self._segment = Segment(source)

    def take_examples(self, source: IterableSource) -> None:
        """Examples are taken one after another."""
        self._iterable = source
        self._segment = Segment()

    def take_batches(self, source: LoaderSource) -> None:
        """Ready batches are taken one after another."""
        self._loader = source
        self._batches = True

    def shuffle(self, buffer: int, blocks: NDArray[np.int64] | None) -> None:
        """A new order every epoch, by blocks if their ends are given.

        Streams are shuffled through a buffer of so many examples.
        """
        self._selection, self._buffer = self._selection.shuffled(blocks), buffer

    def select(self, chosen: Chosen) -> None:
        """Only chosen examples are read; all of them are among those that are left by now."""
        self._selection = self._selection.selected(chosen)

    def draw(self, drawing: Drawing) -> None:
        """An order is drawn every epoch, by weights or a function."""
        self._selection = self._selection.drawn(drawing)

    def shard(
        self, rank: int, world: int, *, uneven: bool, dealt: bool, costs: Costs | None
    ) -> None:
        """Only this rank's part of the epoch is read, dealt by who keeps what, by costs, or not."""
        self._selection = self._selection.shared(
            rank, world, uneven=uneven, dealt=dealt, costs=costs
        )

    def pad(self, *, fills: bool, mask: str | None) -> None:
        """This rank's part is padded, up to a whole batch or not; batches get the mask as field."""
        self._selection, self._mask = self._selection.padded(fills=fills), mask

    def take(self, count: int) -> None:
        """Only the first ``count`` examples are read."""
        self._selection = self._selection.taken(count)

    def skip(self, count: int) -> None:
        """The first ``count`` examples are left out."""
        self._selection = self._selection.skipped(count)

    def map(self, stage: Map) -> None:
        """A function is applied to each item."""
        segment = self._at_hand()
        stages: list[Any] = segment.operations if segment.batch is None else segment.batch_maps
        both = stage.behind(stages[-1]) if stages and isinstance(stages[-1], Map) else None
        if both is not None and not (segment.cache is not None and segment.cache_at == len(stages)):
            stages[-1] = both
        else:
            stages.append(stage)

    def filter(self, stage: Filter) -> None:
        """Some examples are left out."""
        self._at_hand().operations.append(stage)

    def cache(self, stage: CacheStage) -> None:
        """What comes here is kept in a cache."""
        segment = self._at_hand()
        segment.cache, segment.cache_at = stage, len(segment.operations)

    def batch(self, stage: Batch) -> None:
        """Examples become batches."""
        self._at_hand().batch = stage
        self._group, self._batches = stage.n, True

    def plan_batches(self, rule: BatchRule | BatchSchedule) -> None:
        """These batches are planned."""
        self._rule = rule

    def pack(self, stage: Pack) -> None:
        """Sequences are joined; a segment of work comes right before."""
        self._close()
        if self._parts[-1].needs_work_behind:
            self._parts.append(Segment())
        self._parts.append(PackPoint(stage))
        self._renumbered = True

    def scan(self, stage: Scan) -> None:
        """A function with a state is called in order; a segment of work comes right before."""
        self._close()
        if self._parts[-1].needs_work_behind:
            self._parts.append(self._new())
        self._parts.append(ScanPoint(stage))

    def echo(self, stage: Echo) -> None:
        """Items are used several times."""
        self._close()
        if isinstance(stage.counts, UsesByPart):
            self._selection = replace(self._selection, in_step=True)
        self._parts.append(EchoPoint(stage, self._batches, self._on_device))

    def move(self, stage: To) -> None:
        """Batches go to a device."""
        self._close()
        self._parts.append(DevicePoint(stage))
        self._on_device = True

    def plan(self) -> Plan:
        """Return the plan of what was collected."""
        self._close()
        if self._parts and self._parts[-1].needs_work_behind:
            self._parts.append(self._new())
        into_pool = is_followed = leaks = False  # of what comes after the part at hand
        for at, part in reversed(list(enumerate(self._parts))):
            part.at = at
            match part:
                case Segment():
                    part.into_pool, part.is_followed = into_pool, is_followed
                    into_pool = is_followed = False
                case FilterPoint() | PackPoint() | ScanPoint():
                    leaks = True
                case EchoPoint():
                    part.group = 1 if part.holds_batches else self._group
                    part.leaks = leaks
                    into_pool, is_followed = True, part.echo.is_adaptive
                case DevicePoint():
                    into_pool = False
                case _:
                    assert_never(part)
        return Plan(
            self._indexed,
            self._iterable,
            self._loader,
            self._selection.in_batches(self._group),
            self._buffer,
            tuple(self._parts),
            self._group,
            self._mask,
            self._rule,
        )

    def _at_hand(self) -> Segment:
        if self._segment is None:
            self._segment = self._new()
        return self._segment

    def _new(self) -> Segment:
        return Segment(
            batches_in=self._batches, on_device=self._on_device, renumbered=self._renumbered
        )

    def _close(self) -> None:
        """End the segment at hand; between two pools there has to be one."""
        if self._segment is not None or (self._parts and self._parts[-1].needs_work_behind):
            self._parts += self._split(self._at_hand())
        self._segment = None

    def _split(self, segment: Segment) -> list[Part]:
        """Split a segment behind its operations, if what comes out of them may not survive."""
        if segment.batches_in or (segment.source is None and segment.is_plain):
            return [segment]
        each = segment.operations
        budgets = {one.account: one.budget for one in each if one.budget is not None}
        budgets[0] = self._budget
        if not segment.has_filter and all(b == RAISE for b in budgets.values()):
            return [segment]
        again = segment.renumbered
        first = Segment(segment.source, each, segment.cache, segment.cache_at, renumbered=again)
        pieces: list[Part] = [first, FilterPoint(budgets)]
        if segment.batch is not None:
            pieces.append(
                Segment(batch=segment.batch, batch_maps=segment.batch_maps, renumbered=again)
            )
        return pieces
