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
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from stoker.engine.checkpoint import Bounds, Node, PoolSize
from stoker.engine.flow import Flow
from stoker.engine.items import Stream
from stoker.engine.setup import StreamContext
from stoker.engine.skip import Budget
from stoker.schedule.batch_plan import BatchRule
from stoker.schedule.epoch_rest import EpochRest
from stoker.schedule.packing import PackRule
from stoker.schedule.selection import Selection
from stoker.sources.origin import SourceBase, UserObject


@dataclass(frozen=True)
class Traits:
    """Properties of a stage that the checks of later stages ask for.

    Attributes:
        selects: it decides which examples come, or when, by their numbers alone.
        shuffles: it draws an order.
        shards: it leaves a rank its part.
        keeps_fields: its outputs have the fields of its inputs.
        filters: it leaves out examples for which a function says so.
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


class ChainView(Protocol):
    """A stage's view of the chain before it, or of the whole chain that it stands in."""

    @property
    def stages(self) -> tuple[ChainStage, ...]: ...
    @property
    def selection(self) -> Selection: ...

    @property
    def source(self) -> SourceBase: ...
    @property
    def seed(self) -> int: ...
    @property
    def budget(self) -> Budget: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def operations(self) -> tuple[Any, ...]:
        """Its stages that call a function of the user's, in order."""
        ...

    @property
    def echo(self) -> Any: ...
    @property
    def is_batched(self) -> bool: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def drops_last(self) -> bool: ...
    @property
    def follows_clock(self) -> bool:
        """Whether an echo in it decides by the items that are ready."""
        ...

    @property
    def has_workers(self) -> bool: ...
    @property
    def flows(self) -> bool:
        """Whether epochs have a set number of outputs, independent of passes over the data."""
        ...

    @property
    def has_fixed_echo(self) -> bool: ...
    @property
    def may_leave_out(self) -> bool: ...
    def signature(self) -> list[str]:
        """Return what a state must agree with, a line for the source and each stage."""
        ...


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

    @abstractmethod
    def count(self, items: int) -> int:
        """Return how many items come out when ``items`` go in.

        Raises TypeError where only the end of an epoch tells.
        """

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

    @property
    def repeats(self) -> bool:
        """Whether it hands out each item several times."""
        return self.traits.repeats

    @property
    def moves(self) -> bool:
        """Whether its outputs are on a device."""
        return self.traits.moves

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


def followed(stages: Iterable[ChainStage], by: Iterable[ChainStage]) -> tuple[ChainStage, ...]:
    """Return stages as they are with others behind them."""
    found = tuple(stages)
    for other in by:
        found = tuple(stage.followed_by(other) for stage in found)
    return found


def not_known() -> TypeError:
    """Return the error of a count that filters, scans, skip budgets and packing leave open."""
    return TypeError(
        "the number of batches is not known: examples may be filtered, skipped, dropped or packed; "
        ".steps(n) ends an epoch after n"
    )
