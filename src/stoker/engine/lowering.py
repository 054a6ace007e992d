"""From a chain to its plan: the source and then each stage say what they need of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from stoker.engine.checkpoint import Bounds
from stoker.engine.plan.plan import Plan
from stoker.engine.plan.points import (
    OwnPoint,
    Part,
)
from stoker.engine.plan.segment import Segment
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.stream_stage import StreamContext
from stoker.engine.survivors import FilteredStream, FilterRecord
from stoker.schedule.batch_plan import BatchRule
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource, SourceBase
from stoker.stages.batching.batch import Batch
from stoker.stages.cache import CacheStage
from stoker.stages.filter import Filter
from stoker.stages.map import Map
from stoker.stages.skip import RAISE, Budget
from stoker.stages.stage import ChainStage, Traits


@dataclass(frozen=True)
class Sift:
    """Drops outputs of the segment before it: by filters, or as skips.

    It stands in a plan as a ``StreamStage`` does, but in no chain.

    Attributes:
        budgets: the skip budgets, by account: 0 is the pipeline's, others belong to stages.
    """

    budgets: Mapping[int, Budget]
    traits: ClassVar[Traits] = Traits(filters=True)
    kind = "filter"
    is_decided = True
    in_turn = True
    is_adaptive = False

    def stream(self, upstream: SegmentStream, context: StreamContext) -> FilteredStream:
        return FilteredStream(self.budgets, context.point.at - 1, upstream, context.skip_log)

    def read_node(self, saved: Any, bounds: Bounds) -> FilterRecord | None:
        return FilterRecord.from_json(saved, bounds)


def lower(source: SourceBase, stages: Sequence[ChainStage], budget: Budget) -> Plan:
    """Return the plan of a chain; ``budget`` is the pipeline's own for skipping examples."""
    lowering, selection = Lowering(source, budget), Selection()
    for stage in stages:
        selection = stage.select(selection)
        stage.lower(lowering)
    return lowering.plan(selection)


class Lowering:
    """Collects the parts of a plan over a source from the calls of its stages."""

    def __init__(self, source: SourceBase, budget: Budget) -> None:
        self._budget = budget
        self._source = source
        self._parts: list[Part] = []
        self._segment: Segment | None = None  # the current segment
        if not source.yields_batches:
            self._segment = Segment(source if isinstance(source, IndexedSource) else None)
        self._on_device = False
        self._renumbered = False
        self._group = 1
        self._mask: str | None = None
        self._rule: BatchRule | None = None
        self._batches = source.yields_batches  # whether items are batches by now

    def mark_padding(self, field: str) -> None:
        """Batches get a field that tells what of them is padding."""
        self._mask = field

    def map(self, stage: Map) -> None:
        """A function is applied to each item."""
        segment = self._at_hand()
        stages: list[Any] = segment.operations if segment.batch is None else segment.batch_maps
        both = stage.behind(stages[-1]) if stages and isinstance(stages[-1], Map) else None
        is_cached = segment.cache is not None and segment.cache_at == len(stages)
        if both is not None and not is_cached:
            stages[-1] = both
        else:
            stages.append(stage)

    def filter(self, stage: Filter) -> None:
        """Some examples are left out."""
        self._at_hand().operations.append(stage)

    def cache(self, stage: CacheStage) -> None:
        """Items are kept in a cache."""
        segment = self._at_hand()
        segment.cache, segment.cache_at = stage, len(segment.operations)

    def batch(self, stage: Batch) -> None:
        """Examples become batches."""
        self._at_hand().batch = stage
        self._group, self._batches = stage.n, True

    def plan_batches(self, rule: BatchRule) -> None:
        """Batches are planned by a rule."""
        self._rule = rule

    def own(self, stage: ChainStage) -> None:
        """The stage makes its own stream; a segment comes right before if it needs one."""
        self._close()
        takes_any = stage.traits.moves or stage.traits.repeats
        if not takes_any and self._parts[-1].needs_work_behind:
            self._parts.append(self._new())
        self._parts.append(OwnPoint(stage, self._batches, self._on_device))
        self._on_device = self._on_device or stage.traits.moves

    def join(self, length: int) -> None:
        """Items are pieces of full sequences of this length: the segment behind joins them."""
        self._renumbered = True
        self._segment = replace(self._new(), joins=length)

    def plan(self, selection: Selection) -> Plan:
        """Return the plan of the collected parts, for the examples that the stages select."""
        self._close()
        if self._parts and self._parts[-1].needs_work_behind:
            self._parts.append(self._new())
        into_pool = is_followed = leaks = False  # of the parts after this one
        in_turn = True
        for at, part in reversed(list(enumerate(self._parts))):
            part.at = at
            if isinstance(part, Segment):
                part.into_pool, part.is_followed = into_pool, is_followed
                part.is_waited_for, in_turn = in_turn, True
                into_pool = is_followed = False
                continue
            stage = part.stage
            part.group, part.leaks = 1 if part.holds_batches else self._group, leaks
            leaks, in_turn = leaks or part.is_decided, stage.in_turn
            into_pool = stage.traits.repeats or (into_pool and not stage.traits.moves)
            is_followed = is_followed or stage.is_adaptive
        source = self._source
        indexed = source if isinstance(source, IndexedSource) else None
        return Plan(
            indexed,
            source if indexed is None else None,
            selection.in_batches(self._group),
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
        """End the current segment; one follows each part that needs work behind it."""
        if self._segment is not None or (self._parts and self._parts[-1].needs_work_behind):
            self._parts += self._split(self._at_hand())
        self._segment = None

    def _split(self, segment: Segment) -> list[Part]:
        """Split a segment after its operations if filters or skips may drop their outputs."""
        if segment.batches_in or (segment.source is None and segment.is_plain):
            return [segment]
        each = segment.operations
        budgets = {one.account: one.budget for one in each if one.budget is not None}
        budgets[0] = self._budget
        if not segment.has_filter and all(b == RAISE for b in budgets.values()):
            return [segment]
        again = segment.renumbered
        first = replace(segment, batch=None, batch_maps=[])
        pieces: list[Part] = [first, OwnPoint(Sift(budgets), False, self._on_device)]
        if segment.batch is not None:
            pieces.append(
                Segment(batch=segment.batch, batch_maps=segment.batch_maps, renumbered=again)
            )
        return pieces
