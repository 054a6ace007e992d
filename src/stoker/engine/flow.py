"""``Flow``: what the stages of a chain do to its examples, from the source to the last output.

Each stage adds itself (``ChainStage.add_to``): a step to the work on single items, a cache among
these, the batches that they are stacked into, or a stream of its own on top. Stages of the first
three kinds that follow each other are one ``Segment``, whose work is done in one task. No stage
looks at its neighbours for that.

A flow is made once for a chain, and shared by its epochs: nothing in it changes when they run. Its
layers make the streams of an epoch (``engine/epoch.py``), one over the other, and read their nodes
in a state before there are streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from stoker.engine.checkpoint import Bounds, Node
from stoker.engine.items import Stream
from stoker.engine.orders import Orders
from stoker.engine.skip import RAISE, Budget
from stoker.engine.survivors import FilteredStream, FilterRecord
from stoker.engine.work.cached import Cached
from stoker.engine.work.segment import Behind, Segment
from stoker.engine.work.step import RowStep, Stack, WorkAddress
from stoker.sources.origin import IndexedSource, SourceBase


@dataclass
class Own:
    """The layer of a stage that puts a stream of its own on top.

    Attributes:
        stage: a ``StreamStage`` (``stages/stage.py``).
        holds_batches: whether its items are batches.
        on_device: whether it comes after ``.to_torch(device)``.
        group: the number of items in a batch; 1 if items are batches.
        leaks: whether layers behind it may drop items.
        at: its place among the layers.
    """

    stage: Any
    holds_batches: bool
    on_device: bool
    group: int = 1
    leaks: bool = False
    at: int = 0

    def __post_init__(self) -> None:
        self.kind: str | None = self.stage.kind
        self.is_decided: bool = self.stage.is_decided
        self.needs_work_behind = not self.stage.traits.moves
        self.ends_examples = self.holds_batches or not self.stage.traits.repeats

    def look_behind(self, behind: Behind) -> Behind:
        """Note what stands behind it; return what stands behind the layer before it."""
        stage, self.leaks = self.stage, behind.leaks
        return Behind(
            stage.traits.repeats or (behind.into_pool and not stage.traits.moves),
            behind.is_followed or stage.is_adaptive,
            stage.in_turn,
            behind.leaks or self.is_decided,
        )

    def read(self, nodes: Iterator[Any], bounds: Bounds) -> list[Node | None]:
        """Read its node of a state, as ``StreamStage.read_node`` does; change the bounds."""
        # Without a node it keeps the number of items.
        return [] if self.kind is None else [self.stage.read_node(next(nodes), bounds)]

    def open(self, upstream: Any, epoch: Any) -> Stream:
        """Return its stream in an ``EpochStreams``."""
        stream: Stream = epoch.open_own(self, upstream)
        return stream


@dataclass
class Sift:
    """The layer that drops outputs of the segment before it: by filters, or as skips.

    Attributes:
        budgets: what ``max_errors=`` allows, by account: 0 is the pipeline's, others are stages'.
        on_device: whether it comes after ``.to_torch(device)``.
        at: its place among the layers.
    """

    budgets: Mapping[int, Budget]
    on_device: bool
    at: int = 0
    kind: ClassVar[str] = "filter"
    is_decided: ClassVar[bool] = True
    needs_work_behind: ClassVar[bool] = True
    ends_examples: ClassVar[bool] = False

    def look_behind(self, behind: Behind) -> Behind:
        """Return what stands behind the layer before it."""
        return behind._replace(in_turn=True, leaks=True)

    def read(self, nodes: Iterator[Any], bounds: Bounds) -> list[Node | None]:
        """Read its record from a state; None if nothing could be dropped when it was saved."""
        return [FilterRecord.from_json(next(nodes), bounds)]

    def open(self, upstream: Any, epoch: Any) -> Stream:
        """Return its stream in an ``EpochStreams``."""
        return FilteredStream(self.budgets, self.at - 1, upstream, epoch.skip_log)


Layer = Segment | Own | Sift
"""A layer of a flow. ``kind`` is the kind of its node in a state, or None without a node;
``is_decided``: values decide how many items come out; ``needs_work_behind``: a segment follows it;
``ends_examples``: no single example of the source goes on behind it."""


class Flow:
    """What a chain does to its examples: its layers, in the order that data meets them.

    A segment stands first unless a loader does, and behind every other layer, but that a pool may
    follow a filter or the way to a device. A bare loader has no layers.

    Args:
        source: the source.
        orders: the order of its examples in each epoch.
        stages: what adds itself.
        budget: the pipeline's own for skipping examples.
        mask: the field of batches that tells what of them is padding, if they have one.
    """

    def __init__(
        self,
        source: SourceBase,
        orders: Orders,
        stages: Iterable[Any],
        budget: Budget = RAISE,
        mask: str | None = None,
    ) -> None:
        self.source, self.orders, self.mask = source, orders, mask
        self.indexed = source if isinstance(source, IndexedSource) else None
        self.iterated: Any = source if self.indexed is None else None
        self._budget = budget
        self._layers: list[Layer] = []
        self._segment: Segment | None = None  # the current segment
        if not source.yields_batches:
            self._segment = Segment(self.indexed)
        self._on_device = self._renumbered = False
        self._batches = source.yields_batches  # whether items are batches by now
        for stage in stages:
            stage.add_to(self)
        self._end()

    # -- what stages call

    def then(self, step: RowStep) -> None:
        """Apply a step to each item; behind ``into`` to each batch."""
        segment = self._at_hand()
        steps = segment.operations if segment.batch is None else segment.batch_maps
        is_cached = segment.cache is not None and segment.cache_at == len(steps)
        both = step.behind(steps[-1]) if steps and not is_cached else None
        if both is None:
            steps.append(step)
        else:
            steps[-1] = both

    def within(self, cache: Cached) -> None:
        """Keep what all steps so far make of an example in a cache."""
        segment = self._at_hand()
        segment.cache, segment.cache_at = cache, len(segment.operations)

    def into(self, batch: Stack) -> None:
        """Stack examples into batches."""
        self._at_hand().batch = batch
        self._batches = True

    def put(self, stage: Any) -> None:
        """Put the stream of a stage on top; a segment comes right before it if it needs one."""
        self._close()
        takes_any = stage.traits.moves or stage.traits.repeats
        if not takes_any and self._layers[-1].needs_work_behind:
            self._layers.append(self._new())
        self._layers.append(Own(stage, self._batches, self._on_device))
        self._on_device = self._on_device or stage.traits.moves

    def join(self, length: int) -> None:
        """Items are pieces of full sequences: the segment behind joins them to this length.

        With length 0 a step does, which comes next.
        """
        self._renumbered = True
        self._segment = replace(self._new(), joins=length)

    # -- what it is made of

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in the order that data meets them."""
        return tuple(self._layers)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments among the layers."""
        return tuple(layer for layer in self._layers if isinstance(layer, Segment))

    @property
    def steps(self) -> list[RowStep]:
        """All steps, on examples and on batches, in order."""
        return [step for each in self.segments for step in (*each.operations, *each.batch_maps)]

    @cached_property
    def echo(self) -> Own | None:
        """The layer of an echo."""
        own = (layer for layer in self._layers if isinstance(layer, Own))
        return next((layer for layer in own if layer.stage.traits.repeats), None)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of nodes in a state, in the order of their layers."""
        return tuple(layer.kind for layer in self._layers if layer.kind is not None)

    @property
    def is_decided(self) -> bool:
        """Whether the number of items depends on values: filters, budgets, packing and scans."""
        return any(layer.is_decided for layer in self._layers)

    @property
    def has_filter(self) -> bool:
        """Whether a filter is in the chain."""
        return any(segment.has_filter for segment in self.segments)

    @property
    def cache(self) -> Cached | None:
        """The cache, if there is one."""
        return next((each.cache for each in self.segments if each.cache is not None), None)

    @property
    def is_adaptive(self) -> bool:
        """Whether its echo is adaptive, or replays the record of an adaptive one."""
        return self.echo is not None and bool(self.echo.stage.is_adaptive)

    @property
    def carries_pool(self) -> bool:
        """Whether a pool may go on in the next epoch: whatever is in it can be made again there.

        That is so for an echo that follows the stall, right behind the first segment, if
        nothing can be left out, so that all epochs have equally many items; and if the next epoch
        knows the order of this one, which it does not where a user's function says it; nor have
        epochs whose batches are planned equally many.
        """
        echo, orders = self.echo, self.orders
        if self.indexed is None or echo is None or self.kinds != (echo.kind,):
            return False
        if orders.selection.calls_user or orders.rule is not None:
            return False
        return bool(echo.stage.is_adaptive) and not echo.on_device

    def items_of_first(self, examples: int) -> int:
        """Return how many outputs the first segment makes of ``examples`` examples."""
        batch = self.segments[0].batch
        return examples if batch is None else batch.count(examples)

    def uses_behind(self, segment: Segment) -> float:
        """Return how often an output of a segment is used, by a fixed factor behind it."""
        counts = None if self.echo is None else self.echo.stage.counts
        if self.echo is None or counts is None or self.echo.at < segment.at:
            return 1.0
        return float(counts.factor)

    def address(self, at: int, seed: int, epoch: int) -> WorkAddress:
        """Return the address of a layer in an epoch, by its place among the layers."""
        paces = self.orders.paces(epoch) if any(step.progress for step in self.steps) else ()
        return self.orders.address(at, seed, epoch, paces)

    def _at_hand(self) -> Segment:
        if self._segment is None:
            self._segment = self._new()
        return self._segment

    def _new(self) -> Segment:
        return Segment(
            batches_in=self._batches, on_device=self._on_device, renumbered=self._renumbered
        )

    def _close(self) -> None:
        """End the current segment; one follows each layer that needs work behind it."""
        if self._segment is not None or (self._layers and self._layers[-1].needs_work_behind):
            self._layers += self._sifted(self._at_hand())
        self._segment = None

    def _sifted(self, segment: Segment) -> list[Layer]:
        """Split a segment behind its steps on examples, if these may drop or skip some."""
        if segment.batches_in or (segment.source is None and segment.is_plain):
            return [segment]
        each = segment.operations
        budgets = {one.account: one.budget for one in each if one.budget is not None}
        budgets[0] = self._budget
        if not segment.has_filter and all(b == RAISE for b in budgets.values()):
            return [segment]
        first = replace(segment, batch=None, batch_maps=[])
        layers: list[Layer] = [first, Sift(budgets, self._on_device)]
        if segment.batch is not None:
            layers.append(
                Segment(
                    batch=segment.batch,
                    batch_maps=segment.batch_maps,
                    renumbered=segment.renumbered,
                )
            )
        return layers

    def _end(self) -> None:
        """Close the last segment; tell each layer what stands behind it."""
        self._close()
        if self._layers and self._layers[-1].needs_work_behind:
            self._layers.append(self._new())
        behind = Behind()
        for at, layer in reversed([*enumerate(self._layers)]):
            layer.at = at
            behind = layer.look_behind(behind)
            if isinstance(layer, Own) and not layer.holds_batches:
                layer.group = self.orders.group
