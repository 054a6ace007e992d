"""``ChainStage``: one step of a chain in one file.

It checks what stands before it, counts what it lets through, describes itself, and adds its work to
the flow of a chain; nothing else knows its type. To add one: a frozen dataclass that inherits from
``ChainStage`` in a file of its own, and a method of ``Pipeline`` that appends it. What can be made
of these is a ``Stage`` (``stages.composite``), and needs nothing here.

A ``StreamStage`` puts a stream of its own on top, and is whole in one file: it makes the stream of
an epoch, and reads that stream's node of a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from stoker.engine.checkpoint import Bounds, Node, PoolSize
from stoker.engine.flow import Flow
from stoker.engine.items import Stream
from stoker.engine.orders import Orders
from stoker.engine.setup import StreamContext
from stoker.engine.skip import RAISE, Budget
from stoker.engine.work.step import RowStep
from stoker.engine.workers.make import Workers
from stoker.errors import CombinationError
from stoker.schedule.batch_plan import BatchRule
from stoker.schedule.echo_record import RunRecord
from stoker.schedule.epoch_rest import EpochRest
from stoker.schedule.packing import PackRule
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource, SourceBase, UserObject


@dataclass(frozen=True)
class Traits:
    """Properties of a stage that the checks of later stages ask for.

    Attributes:
        selects: it decides which examples come, or when, by their numbers alone.
        shuffles: it draws an order.
        shards: it leaves a rank its part.
        keeps_fields: its outputs have the fields of its inputs.
        filters: fewer examples may come out of it than go in.
        by_number: numbers alone tell how many, though it filters or joins.
        skips: it may leave out examples on which it fails.
        is_random: it draws random numbers.
        changes: what it makes of an example changes in the course of training.
        repeats: it hands out each item several times.
        batches: its outputs are batches.
        moves: its outputs are on a device.
        caches: it keeps what passes, and changes nothing of it, nor of a state.
        joins: it makes one output of as many inputs as it takes.
        scans: what it makes of an example depends on those before it.
        late: examples that are not ready may come after later ones.
        inside: it belongs to a part of a mixture, whose other parts pass it untouched.
    """

    selects: bool = False
    shuffles: bool = False
    shards: bool = False
    keeps_fields: bool = False
    filters: bool = False
    by_number: bool = False
    skips: bool = False
    is_random: bool = False
    changes: bool = False
    repeats: bool = False
    batches: bool = False
    moves: bool = False
    caches: bool = False
    joins: bool = False
    scans: bool = False
    late: bool = False
    inside: bool = False


@dataclass(frozen=True)
class ChainView:
    """A chain as its stages see it: what stands before one, or the whole.

    Attributes:
        source: the source of the examples.
        seed: the seed of shuffling, echoing and random maps; ``is_seed_drawn``: the user gave none.
        budget: the budget for skipping examples.
        stages: in order; each is bound to the stages before it, and has a ``name`` and ``traits``.
        workers: the number and kind of workers; None for ``default_threads``.
        steps: the most outputs of an epoch, from ``.steps(n)``; None without a limit.
        flows: whether data epochs follow each other beneath the epochs of ``steps``: ``.repeat()``.
        record: the decisions of an earlier run that are repeated, or None.
        leg: the rest of an epoch that other ranks began; None for whole epochs. A pipeline's own
            chain never has one; the chain of a run may (``on_leg``).
    """

    source: SourceBase
    seed: int
    is_seed_drawn: bool
    budget: Budget = RAISE
    stages: tuple[ChainStage, ...] = ()
    workers: Workers | None = None
    steps: int | None = None
    flows: bool = False
    record: RunRecord | None = field(default=None, compare=False)
    leg: EpochRest | None = field(default=None, compare=False)

    @cached_property
    def orders(self) -> Orders:
        """Which examples each epoch has, and in what order."""
        selection, batch = Selection(), self.batch
        for stage in self.stages:
            selection = stage.select(selection)
        group = 1 if batch is None else batch.n
        selection = replace(selection.in_batches(group), leg=self.leg)
        rules = (stage.batch_rule for stage in reversed(self.stages))
        rule = next((rule for rule in rules if rule is not None), None)
        return Orders(self.indexed, selection, group, rule)

    @cached_property
    def flow(self) -> Flow:
        """What its stages do to the examples."""
        masks = (stage.padding_mask for stage in self.stages)
        mask = next((mask for mask in masks if mask is not None), None)
        return Flow(self.source, self.orders, self.stages, self.budget, mask)

    @property
    def indexed(self) -> IndexedSource | None:
        """Its source, if examples are read by number; else None."""
        return self.source if isinstance(self.source, IndexedSource) else None

    @property
    def selection(self) -> Selection:
        """Which examples an epoch has, and in what order."""
        return self.orders.selection

    @property
    def batch(self) -> Any:
        """Its batch stage, or None."""
        return first_with(self.stages, lambda t: t.batches)

    @property
    def operations(self) -> tuple[RowStep, ...]:
        """The operations on single examples before the first pool or batch, in order."""
        first = next(iter(self.flow.segments), None)
        return () if first is None else tuple(first.operations)

    @property
    def echo(self) -> Any:
        """Its echo, or None."""
        return first_with(self.stages, lambda t: t.repeats)

    @property
    def has_fixed_echo(self) -> bool:
        """Whether it has an echo with a fixed factor."""
        return self.echo is not None and not self.echo.is_adaptive

    @property
    def follows_clock(self) -> bool:
        """Whether it has an echo that decides by the items that are ready."""
        return self.record is None and self.echo is not None and self.echo.is_adaptive

    @property
    def is_batched(self) -> bool:
        """Whether its outputs are batches."""
        return self.source.yields_batches or any(s.traits.batches for s in self.stages)

    @property
    def batch_size(self) -> int:
        """The examples in a batch, 1 where the chain makes none."""
        return self.orders.group

    @property
    def drops_last(self) -> bool:
        """Whether a short last batch is left out."""
        return self.batch is not None and bool(self.batch.drop_last)

    @property
    def leaves_out_by_value(self) -> bool:
        """Whether values decide how many are left: by filters, ``max_errors=`` or packing."""
        each = [stage.traits for stage in self.stages]
        return self.budget != RAISE or any(
            ((t.filters or t.joins) and not t.by_number) or t.skips for t in each
        )

    @property
    def may_leave_out(self) -> bool:
        """Whether fewer examples may come out than the source has."""
        return self.leaves_out_by_value or any(stage.traits.filters for stage in self.stages)

    @property
    def has_workers(self) -> bool:
        """Whether workers prepare outputs while the consumer trains."""
        return self.workers is None or self.workers.count != 0

    def signature(self) -> list[str]:
        """Return the lines that a state, a record or a feed must match."""
        lines = [stage.signature() for stage in self.stages]
        return [self.source.signature(), *(line for line in lines if line is not None)]


@dataclass(frozen=True)
class ChainStage(ABC):
    """One step of a chain: a frozen value.

    Attributes:
        part_of: what the user's ``Stage`` that it is a part of calls itself, "" if there is none.
    """

    part_of: str = field(default="", kw_only=True, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Its name, for people."""
        return f"{self.part_of}: {self.call}" if self.part_of else self.call

    @property
    @abstractmethod
    def call(self) -> str:
        """The call that makes it, as people read it."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """Its properties that other stages ask for."""

    @abstractmethod
    def bind(self, before: ChainView) -> ChainStage:
        """Return the stage with its address behind ``before``.

        Raises ValueError, TypeError or LookupError where it cannot stand there.
        """

    def followed_by(self, stage: ChainStage) -> ChainStage:
        """Return it with a bound stage somewhere behind it, on which a default may depend."""
        return self

    def begin(self, chain: ChainView) -> None:  # noqa: B027 most have nothing to do
        """Get ready for an epoch of the whole chain; called by each ``iter()``.

        Raises ValueError or StateError where it cannot run.
        """

    def check_leg(self, chain: ChainView) -> None:  # noqa: B027 few stages mind
        """Raise StateError if other ranks cannot go on with it in the middle of an epoch."""

    def on_leg(self, leg: EpochRest, rank: int) -> ChainStage:
        """Return it for the rest of an epoch that other ranks began."""
        return self

    def of_ranks(self, rank: int, world: int, batches: Any, examples: int) -> ChainStage:
        """Return it for another rank, number of ranks, and size of batches.

        ``batches``: as ``Batch.size`` says it; ``examples``: the length of the source. Raises
        ValueError or TypeError for what is no size.
        """
        return self

    def apart(self) -> ChainStage:
        """Return it for a chain that other ranks do not iterate over."""
        return self

    def check_length(self, was: SourceBase, now: SourceBase) -> None:  # noqa: B027 few stages mind
        """Raise ValueError where it cannot go on over a source that has another length now."""

    @property
    def allocate(self) -> Callable[[int], memoryview] | None:
        """What allocates the memory of batches that it moves; None if it moves none."""
        return None

    def user_objects(self) -> list[UserObject]:
        """Return the objects of the user's that it calls."""
        return []

    def select(self, selection: Selection) -> Selection:
        """Return a selection of examples, by numbers, as it is behind this stage."""
        return selection

    @property
    def batch_rule(self) -> BatchRule | PackRule | None:
        """How it plans batches, or packed sequences; None if it does not."""
        return None

    @property
    def padding_mask(self) -> str | None:
        """The field of batches that tells what of them is padding; None if it adds none."""
        return None

    def add_to(self, flow: Flow) -> None:  # noqa: B027 what only selects needs no more
        """Add its work to a flow, behind that of the stages before it."""

    def count(self, items: int) -> int:
        """Return how many items come out when ``items`` go in.

        Not asked of what selects, which ``Chain.examples`` counts. Raises TypeError where only the
        end of an epoch tells.
        """
        return items

    @abstractmethod
    def signature(self) -> str | None:
        """Return its line of what a state must agree with; None if it changes no stream."""

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Return what ``print(pipeline)`` says of it after its name.

        Args:
            chain: the whole chain that it stands in.
            pool_size: the size of the pool of its echo, if it has one.
        """
        return ""


@dataclass(frozen=True)
class StreamStage(ChainStage):
    """A stage with a stream of its own.

    A segment of work comes right before it, unless it moves batches to a device or repeats items.
    One comes right behind it, unless it moves batches.

    Attributes:
        kind: that of its node in a state; None if it has none, since numbers tell all.
        is_decided: whether values decide how many items come out.
        in_turn: whether it takes its inputs one after another, rather than those that are ready.
        is_adaptive: whether it decides how many inputs to take by how many are ready.
    """

    kind: ClassVar[str | None]
    is_decided: ClassVar[bool] = True
    in_turn: ClassVar[bool] = True

    @property
    def is_adaptive(self) -> bool:
        return False

    def add_to(self, flow: Flow) -> None:
        flow.put(self)

    @abstractmethod
    def stream(self, upstream: Any, context: StreamContext) -> Stream:
        """Return the stream of an epoch over that of its inputs.

        That is a ``SegmentStream``. If it repeats items, it is any ``PolledStream``; if it moves
        batches, a ``PulledStream``, as it returns.
        """

    def read_node(self, saved: Any, bounds: Bounds) -> Node:
        """Read the node of its stream from a state, before there are streams.

        Stages with a ``kind`` define it. Change ``bounds`` to those behind the stage.

        Raises TypeError, LookupError, ValueError or msgspec.ValidationError for what no run could
        have saved, or StateError.
        """
        raise NotImplementedError


def first_with(stages: Iterable[ChainStage], has: Callable[[Traits], object]) -> ChainStage | None:
    """Return the first stage whose traits pass a test, or None."""
    return next((stage for stage in stages if has(stage.traits)), None)


def refuse_behind(
    call: str, before: ChainView, has: Callable[[Traits], object], instead: str
) -> None:
    """Raise CombinationError where a stage before passes a test; ``instead``: what to do."""
    stage = first_with(before.stages, has)
    if stage is not None:
        raise CombinationError(f".{call} cannot follow {stage.name}: {instead}")


def followed(stages: Iterable[ChainStage], by: Iterable[ChainStage]) -> tuple[ChainStage, ...]:
    """Return stages as they are with others behind them."""
    found = tuple(stages)
    for other in by:
        found = tuple(stage.followed_by(other) for stage in found)
    return found


def not_known() -> TypeError:
    """Return the error of a count that filters, scans, ``max_errors=`` and packing leave open."""
    return TypeError(
        "the number of batches is not known: examples may be filtered, skipped, dropped or packed; "
        ".steps(n) ends an epoch after n"
    )
