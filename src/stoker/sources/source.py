"""``Source``: the origin of a chain's examples, or of its ready batches.

Three kinds: an ``IndexedSource`` gives any example by its number, so that order, sharing and
resuming are integers alone; a stream (``sources.iterable``) can only be read from its beginning; a
loader (``sources.loader``) yields ready batches in an order of its own. To add one, subclass one of
these in a file of its own, and add a function to ``constructors``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.fingerprint import Fingerprint
from stoker.distributed.frameworks import warn_unsharded
from stoker.schedule.dealing import Dealer, RankOrder
from stoker.schedule.selection import Selection
from stoker.stats import PartStats

Indices = Sequence[int] | NDArray[np.int64]
# Of batches that are gathered at once: more would leave the CPU's caches. Chosen, not measured.
_TOGETHER_BYTES = 1 << 20


class UserObject(NamedTuple):
    """A user's object that a source or a stage calls."""

    name: str
    """The name of its caller, for people."""
    value: Any


class ChainOfSource(Protocol):
    """A source's view of the chain that begins with it."""

    @property
    def selection(self) -> Selection: ...
    @property
    def stages(self) -> tuple[Any, ...]: ...
    @property
    def flows(self) -> bool:
        """Whether epochs have a set number of outputs, independent of passes over the data."""
        ...

    @property
    def has_fixed_echo(self) -> bool: ...
    @property
    def may_leave_out(self) -> bool: ...


class SourcePlan(Protocol):
    """How the engine reads a source; the source calls one of these methods."""

    def read(self, source: Any) -> None:
        """Examples are read by number, from an ``IndexedSource``."""
        ...

    def take_examples(self, source: Any) -> None:
        """Examples are taken one after another, from an ``IterableSource``."""
        ...

    def take_batches(self, source: Any) -> None:
        """Ready batches are taken one after another, from a ``LoaderSource``."""
        ...


class Source(ABC):
    """The beginning of a chain.

    Attributes:
        yields_batches: whether it yields ready batches of a user's loader.
        is_indexed: whether any example can be read by its number.
        has_own_order: whether it decides the order of an epoch's examples itself.
        may_grow: whether ``measured`` may find another length.
    """

    yields_batches: bool = False
    is_indexed: bool = False
    has_own_order: bool = False
    may_grow: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The source's name, for people."""

    @property
    def fields(self) -> Sequence[str | int] | None:
        """The fields that every example has; None: unknown."""
        return None

    @abstractmethod
    def count(self) -> int:
        """Return the examples (of a loader, batches) of an epoch.

        Raises TypeError where only the end tells.
        """

    def measured(self) -> Source:
        """Return this source with its current length: itself, if unchanged.

        Raises ValueError if its length must not change.
        """
        return self

    def examples(self, selection: Selection) -> int:
        """Return the examples (of a loader, batches) that an epoch has on this rank.

        Raises TypeError where only the end tells.
        """
        return selection.count(self.count())

    @property
    @abstractmethod
    def is_counted(self) -> bool:
        """Whether an epoch is sure to end after ``count`` examples."""

    @property
    def takes_state(self) -> bool:
        """Whether it has its own state to resume from."""
        return False

    def state_between(self, *, left: bool) -> Any:
        """Return its own state between epochs, None if it has none.

        A pass that was ``left`` in its middle has ended: the next epoch begins another.
        """
        return None

    @abstractmethod
    def check_state(self, chain: ChainOfSource) -> None:
        """Raise StateError where a chain over it cannot be saved in the middle of an epoch."""

    def outline(self) -> str:
        """Return its line of the outline, which must equal a saved state's: by default its kind."""
        return type(self).__name__

    @abstractmethod
    def extent(self, *, is_followed: bool) -> str:
        """Return its size and its readers, as text for ``print``.

        Args:
            is_followed: whether an adaptive echo follows its speed.
        """

    @abstractmethod
    def lower(self, to: SourcePlan) -> None:
        """Tell the engine how to read it."""

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn where each of several ranks would get all examples."""
        if not is_sharded:
            warn_unsharded()

    def set_epoch(self, epoch: int) -> None:  # noqa: B027 (most sources need not know)
        """Set the next epoch, for a source whose data does not follow from the epoch's order."""

    def lag_outputs(self) -> int | None:
        """Return how many outputs of a shared feed wait for this job; None without a feed."""
        return None

    def attribute(self, name: str) -> Any:
        """Return an attribute that the pipeline passes on: ``class_names``, a loader's ``dataset``.

        Raises AttributeError if it has no such attribute.
        """
        kind = "a folder have" if name == "class_names" else "a loader have a"
        raise AttributeError(f"only pipelines from {kind} {name}")


class Rows(ABC):
    """Rows in arrays: batches are gathered from them without making single examples.

    Attributes:
        releases_gil: whether gathering releases the GIL, so that threads gather in parallel.
        parts: how many separate gathers a batch takes; the GIL is needed between them.
    """

    releases_gil: bool = True
    parts: int = 1

    def together(self, rows: int) -> int:
        """Return how many batches of so many rows are gathered at once, if that is quick.

        This shares the fixed cost of a gather. The batches stay in the CPU's caches, except for a
        few large ones.
        """
        nbytes = rows * pytree.nbytes(self.allocate(1, Recycler()))
        return max(4, min(64, _TOGETHER_BYTES // max(1, nbytes)))

    @abstractmethod
    def allocate(self, rows: int, recycler: Recycler) -> Any:
        """Return the arrays of a batch, to be filled by ``gather``."""

    @abstractmethod
    def split(self, batch: Any, rows: int) -> list[Any]:
        """Return allocated arrays as batches of ``rows``: views, the last one of the rest."""

    @abstractmethod
    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        """Copy rows into ``batch``, from its row ``start`` on."""

    def gathered(self, indices: NDArray[np.int64], recycler: Recycler) -> Any:
        """Return the arrays of a batch, filled."""
        batch = self.allocate(len(indices), recycler)
        self.gather(indices, batch, 0)
        return batch


class Reader(Protocol):
    """Reads the examples of one epoch, many at a time.

    Attributes:
        requests: how many reads may be under way.
    """

    requests: int

    def expect(self, indices: Indices) -> None:
        """Start to read examples that will be fetched; returns at once."""
        ...

    def fetch(self, indices: Indices) -> list[Any]:
        """Return the examples at these indices. An error concerns the first of them alone."""
        ...

    def close(self) -> None:
        """Cancel the reads under way."""
        ...


class IndexedSource(Source):
    """A source that gives any example by its number.

    Safe to use from any thread, except for the user's objects in it: each thread has a source with
    its own copies.

    Attributes:
        runs_user_code: whether reading runs the user's Python code, which may draw from global
            random generators.
        fits_page_cache: whether its files are read whole from a local disk, so that the page cache
            may keep them as well as a cache of stoker's.
        prefers_blocks: whether single examples are expensive to read and whole blocks are not, so
            that by default they are shuffled by blocks.
        is_numbered: whether an example's fingerprint is its number alone.
    """

    is_indexed = True
    is_counted = True
    runs_user_code: bool = False
    fits_page_cache: bool = False
    prefers_blocks: bool = False
    is_numbered: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: Indices) -> list[Any]:
        """Return the examples at these indices. An error concerns the first of them alone."""

    @abstractmethod
    def path(self, index: int) -> str | None:
        """Return the file or URL an example comes from, where there is one."""

    def local_path(self, index: int) -> str | None:
        """Return the local file whose whole content is the example, if there is one."""
        return None

    def identity(self) -> str | None:
        """Return this source's identity, the same in all processes; None if unknown."""
        return None

    def contents(self) -> str:
        """Return a digest of its contents, for a source without identity."""
        return ""

    def name_of(self, index: int) -> str:
        """Return an example's name, the same on every host with the same data: no whole path."""
        return str(index)

    @abstractmethod
    def fingerprint(self, index: int) -> Fingerprint:
        """Return the fingerprint of an example's current content."""

    def reader(self, selection: Selection | None = None) -> Reader | None:
        """Open a reader that reads an epoch ahead of use; None where ``fetch`` is as fast.

        ``selection``: the examples that will be read, about in their order; None: any, in any
        order.
        """
        return None

    def user_objects(self) -> list[UserObject]:
        """Return the user's objects that it calls."""
        return []

    def with_user_objects(self, objects: Sequence[Any]) -> Self:
        """Return this source with other user objects in their place, in the same order."""
        return self

    def with_own(self, reader: Reader) -> Reader:
        """Return the reader of the original source, with this source's user objects."""
        return reader

    def order(
        self,
        selection: Selection,
        seed: int,
        epoch: int,
        dealer: Dealer | None = None,
        group: int = 1,
    ) -> RankOrder:
        """Return the order of an epoch's examples on this rank."""
        return selection.rank_order(len(self), seed, epoch, dealer, group)

    def part_stats(self, order: RankOrder, examples: int) -> tuple[PartStats, ...]:
        """Return what the first so many examples of an epoch are of, if there are parts."""
        return ()

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """For each block that is cheap to read as a whole, the number after its last example."""
        return None

    @property
    def rows(self) -> Rows | None:
        """What gathers whole batches, where examples lie in arrays."""
        return None

    def count(self) -> int:
        return len(self)

    def check_state(self, chain: ChainOfSource) -> None:
        """Accept every position: any example can be read again."""

    def outline(self) -> str:
        return f"{type(self).__name__} of {len(self)}"

    def extent(self, *, is_followed: bool) -> str:
        return f"{len(self):,} examples"

    def lower(self, to: SourcePlan) -> None:
        to.read(self)


def check_fields(source: Source, on: str | int | None) -> None:
    """Refuse a field that the source's examples do not have.

    Raises LookupError, which names the existing fields.
    """
    fields = source.fields
    if on is None or fields is None:
        return
    positions = range(-len(fields), len(fields))
    if on in fields or (isinstance(on, int) and on in positions):
        return
    shown = ", ".join(repr(f) for f in fields) or "no fields: they are single arrays"
    raise pytree.FieldError(f"no field {on!r}; the examples of {source.name} have {shown}")
