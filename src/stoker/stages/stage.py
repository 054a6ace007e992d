"""What a stage is: one step of a chain, in one file.

A stage checks what stands before it, counts what it lets through, describes itself, and lowers
itself to what the engine runs; nothing else knows its type. To add one: a frozen dataclass with the
members of ``Stage`` in a file of its own, and a method of ``Pipeline`` that appends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.orders import Selection

if TYPE_CHECKING:
    from stoker.sources.iterable import IterableSource
    from stoker.sources.loader import LoaderSource
    from stoker.sources.source import IndexedSource, Source
    from stoker.stages.batch import Batch
    from stoker.stages.cache import CacheStage
    from stoker.stages.echo import Echo
    from stoker.stages.filter import Filter
    from stoker.stages.map import Map
    from stoker.stages.skip import Budget
    from stoker.stages.to import To


@dataclass(frozen=True)
class Traits:
    """What a stage does to what passes, as far as the checks of later stages ask.

    Attributes:
        selects: it decides which examples come, or when, by their numbers alone.
        shuffles: it draws an order.
        shards: it leaves a rank its part.
        keeps_fields: its outputs have the fields of its inputs.
        filters: it leaves out examples for which a function says so.
        skips: it may leave out examples on which it fails.
        is_random: it draws random numbers.
        repeats: it hands out each item several times.
        batches: its outputs are batches.
        moves: its outputs are on a device.
        caches: it keeps what passes, and changes nothing of it, nor of a state.
    """

    selects: bool = False
    shuffles: bool = False
    shards: bool = False
    keeps_fields: bool = False
    filters: bool = False
    skips: bool = False
    is_random: bool = False
    repeats: bool = False
    batches: bool = False
    moves: bool = False
    caches: bool = False


@dataclass
class PoolSize:
    """The size of an echo's pool, once it is known.

    Attributes:
        size: items.
        item_bytes: bytes of the first item, 0 while that is not known.
    """

    size: int
    item_bytes: int = 0


class Before(Protocol):
    """The chain before a stage, as far as checks of stages ask."""

    @property
    def source(self) -> Source:
        """Where it begins."""
        ...

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Its stages, in order."""
        ...

    @property
    def is_batched(self) -> bool:
        """Whether its outputs are batches."""
        ...

    @property
    def batch_size(self) -> int:
        """The examples in a batch, 1 where the chain makes none."""
        ...

    @property
    def may_leave_out(self) -> bool:
        """Whether examples may be left out on the way."""
        ...

    @property
    def has_fixed_echo(self) -> bool:
        """Whether an echo in it has a fixed factor."""
        ...

    @property
    def echoes(self) -> tuple[Echo, ...]:
        """Its echoes, in order."""
        ...

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What is done to single examples, in order."""
        ...

    @property
    def selection(self) -> Selection:
        """Which examples an epoch has, and in what order."""
        ...

    @property
    def seed(self) -> int:
        """The seed of all that is drawn."""
        ...

    @property
    def has_workers(self) -> bool:
        """Whether anything is prepared while the consumer trains."""
        ...

    def outline(self) -> list[str]:
        """Return the lines that a state must agree with."""
        ...


class Stage(Protocol):
    """One step of a chain: a frozen value."""

    @property
    def name(self) -> str:
        """Name the stage for people."""
        ...

    @property
    def traits(self) -> Traits:
        """What it does, as far as others ask."""
        ...

    def placed(self, before: Before) -> Stage:
        """Return the stage with its address behind ``before``.

        Raises ValueError, TypeError or LookupError where it cannot stand there.
        """
        ...

    def begin(self, chain: Before) -> None:
        """Get ready for an epoch of the whole chain; called by each ``iter()``.

        Raises ValueError or StateError where it cannot run.
        """
        ...

    def lower(self, to: Lowering) -> None:
        """Tell the engine what to do."""
        ...

    def count(self, items: int) -> int:
        """Return how many items come out when ``items`` go in.

        Raises TypeError where only the end of an epoch tells.
        """
        ...

    def outline(self) -> str | None:
        """Return its line of what a state must agree with; None if it changes no stream."""
        ...

    def note(self, chain: Before, sizes: Mapping[int, PoolSize]) -> str:
        """Return what ``print(pipeline)`` says of it after its name.

        Args:
            chain: the whole chain that it stands in.
            sizes: the sizes of pools that are known, by the position of their echo.
        """
        ...


class Operation(Protocol):
    """A function that is applied to single items: a map, or a filter.

    Attributes:
        fn: the user's function.
        makes_values: whether what it returns takes the place of what it was given, so that None is
            a mistake.
        budget: its own skip budget, or None for the pipeline's; ``account`` tells it from others'.
    """

    @property
    def name(self) -> str: ...

    @property
    def fn(self) -> Callable[..., Any]: ...

    @property
    def makes_values(self) -> bool: ...

    @property
    def budget(self) -> Budget | None: ...

    @property
    def account(self) -> int: ...

    def compile(self, rejected: object) -> Callable[..., Any]:
        """Return a function of an item, and of a generator if it has a key.

        It pickles if the user's function does.
        """
        ...

    def key(self, seed: int, epoch: int, rank: int) -> NDArray[np.uint64] | None:
        """Return what keys its generator in an epoch, None if it draws nothing."""
        ...

    def watched(
        self, fn: Callable[..., Any], tell: Callable[[int, str], None]
    ) -> Callable[..., Any]:
        """Return what ``compile`` returned, looked at for draws from global generators.

        ``tell`` is called with the position of the random map and their names, once.
        """
        ...


class Lowering(Protocol):
    """Collects what a chain needs from the engine, in order; ``engine.lower`` has the only one.

    The source calls one of the first three, then each stage one of the others.
    """

    def read(self, source: IndexedSource) -> None:
        """Examples are read by number."""
        ...

    def take_examples(self, source: IterableSource) -> None:
        """Examples are taken one after another."""
        ...

    def take_batches(self, source: LoaderSource) -> None:
        """Ready batches are taken one after another."""
        ...

    def shuffle(self, buffer: int) -> None:
        """A new order every epoch; streams are shuffled through a buffer of so many examples."""
        ...

    def shard(self, rank: int, world: int, *, uneven: bool) -> None:
        """Only this rank's part of the epoch is read."""
        ...

    def take(self, count: int) -> None:
        """Only the first ``count`` examples are read."""
        ...

    def map(self, stage: Map) -> None:
        """A function is applied to each item."""
        ...

    def filter(self, stage: Filter) -> None:
        """Some examples are left out."""
        ...

    def cache(self, stage: CacheStage) -> None:
        """What comes here is kept in a cache."""
        ...

    def batch(self, stage: Batch) -> None:
        """Examples become batches."""
        ...

    def echo(self, stage: Echo) -> None:
        """Items are used several times."""
        ...

    def move(self, stage: To) -> None:
        """Batches go to a device."""
        ...


def first_with(stages: Iterable[Stage], has: Callable[[Traits], object]) -> Stage | None:
    """Return the first stage whose traits pass a test, or None."""
    return next((stage for stage in stages if has(stage.traits)), None)


def not_known() -> TypeError:
    """Return the error of a count that filters and skip budgets leave open."""
    return TypeError(
        "the number of batches is not known: examples may be filtered or skipped; "
        ".steps(n) ends an epoch after n"
    )
