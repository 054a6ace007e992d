"""What a source is: where the examples, or the ready batches, of a chain come from.

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
from stoker.schedule.dealing import Dealer, Order
from stoker.schedule.orders import Selection
from stoker.stats import PartStats

Indices = Sequence[int] | NDArray[np.int64]
# Of batches that are gathered at once: more would leave the CPU's caches. Chosen, not measured.
_TOGETHER_BYTES = 1 << 20


class UserObject(NamedTuple):
    """An object of the user's that a source or a stage calls."""

    name: str
    """What calls it, for people."""
    value: Any


class ChainOfSource(Protocol):
    """What a source sees of the chain that begins with it."""

    @property
    def selection(self) -> Selection: ...
    @property
    def stages(self) -> tuple[Any, ...]: ...
    @property
    def flows(self) -> bool:
        """Whether epochs have a set number of outputs, and the data flows on beneath them."""
        ...

    @property
    def has_fixed_echo(self) -> bool: ...
    @property
    def may_leave_out(self) -> bool: ...


class SourcePlan(Protocol):
    """What a source tells the engine; it calls one of these."""

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
    """Where a chain begins.

    Attributes:
        yields_batches: whether what comes out are batches, ready made by a foreign loader.
        is_indexed: whether any example can be had by its number.
        has_own_order: whether it decides itself in what order an epoch's examples come.
        may_grow: whether ``measured`` may find it longer, or shorter, than it was.
    """

    yields_batches: bool = False
    is_indexed: bool = False
    has_own_order: bool = False
    may_grow: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Name the source for people."""

    @property
    def fields(self) -> Sequence[str | int] | None:
        """The fields that every example is known to have; None: nothing is known of them."""
        return None

    @abstractmethod
    def count(self) -> int:
        """Return the examples (of a loader, batches) of an epoch.

        Raises TypeError where only the end tells.
        """

    def measured(self) -> Source:
        """Return this source as long as it is now: itself, where that has not changed.

        Raises ValueError where it may not change.
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
        """Whether an epoch is sure to end where ``count`` says."""

    @property
    def takes_state(self) -> bool:
        """Whether it has a state of its own to go on from."""
        return False

    def state_between(self, *, left: bool) -> Any:
        """Return its own state between epochs, None if it has none.

        A pass that was ``left`` in its middle is over: the next epoch begins another.
        """
        return None

    @abstractmethod
    def check_state(self, chain: ChainOfSource) -> None:
        """Raise StateError where a chain over it cannot be saved in the middle of an epoch."""

    def outline(self) -> str:
        """Return its line of what a state must agree with: its kind, if nothing else is known."""
        return type(self).__name__

    @abstractmethod
    def extent(self, *, is_followed: bool) -> str:
        """Say how much there is, and what reads it.

        Args:
            is_followed: whether an adaptive echo follows how fast it is.
        """

    @abstractmethod
    def lower(self, to: SourcePlan) -> None:
        """Tell the engine how to read it."""

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn where each of several ranks would be given everything."""
        if not is_sharded:
            warn_unsharded()

    def set_epoch(self, epoch: int) -> None:  # noqa: B027 (most sources need not know)
        """Tell it which epoch comes next, where it does not follow from the epoch's order."""

    def lag_outputs(self) -> int | None:
        """Return how many outputs wait for this job where others take them too; None elsewhere."""
        return None

    def attribute(self, name: str) -> Any:
        """Return what a pipeline passes on of its source: ``class_names``, a loader's ``dataset``.

        Raises AttributeError where there is no such thing.
        """
        kind = "a folder have" if name == "class_names" else "a loader have a"
        raise AttributeError(f"only pipelines from {kind} {name}")


class Rows(ABC):
    """Examples that lie in arrays, so that batches are gathered without making single ones.

    Attributes:
        releases_gil: whether gathering does, so that threads gather side by side.
        parts: how many gathers it takes; in between, the GIL is wanted.
    """

    releases_gil: bool = True
    parts: int = 1

    def together(self, rows: int) -> int:
        """Return how many batches of so many rows are gathered at once, if that is quickly done.

        It shares what a gather costs. They stay in the CPU's caches, but for a few large ones.
        """
        nbytes = rows * pytree.nbytes(self.allocate(1, Recycler()))
        return max(4, min(64, _TOGETHER_BYTES // max(1, nbytes)))

    @abstractmethod
    def allocate(self, rows: int, recycler: Recycler) -> Any:
        """Return the arrays of a batch, to be filled by ``gather``."""

    @abstractmethod
    def split(self, batch: Any, rows: int) -> list[Any]:
        """Return what was allocated as batches of ``rows``: views, the last one of the rest."""

    @abstractmethod
    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        """Copy rows into ``batch``, from its row ``start`` on."""

    def gathered(self, indices: NDArray[np.int64], recycler: Recycler) -> Any:
        """Return the arrays of a batch, filled."""
        batch = self.allocate(len(indices), recycler)
        self.gather(indices, batch, 0)
        return batch


class Reader(Protocol):
    """Reads the examples of one epoch, many of them at a time.

    Attributes:
        requests: how many reads may be under way.
    """

    requests: int

    def expect(self, indices: Indices) -> None:
        """Begin to read what will be fetched; returns at once."""
        ...

    def fetch(self, indices: Indices) -> list[Any]:
        """Return the examples at these indices. An error concerns the first of them alone."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


class IndexedSource(Source):
    """A source that gives any example by its number.

    Safe to use from any thread, but for the objects of the user's in it: each thread has a source
    with copies of its own.

    Attributes:
        runs_user_code: whether reading runs Python code of the user's, which may draw from global
            random generators.
        fits_page_cache: whether its files are read whole from a local disk, so that the page cache
            may keep them as well as a cache of stoker's.
        prefers_blocks: whether examples are dear to read but beside those of their block, so that
            they are shuffled by blocks unless the user says otherwise.
        is_numbered: whether the fingerprint of an example is its number and nothing else.
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
        """Return the file of this host that an example is the whole of, where there is one."""
        return None

    def identity(self) -> str | None:
        """Return what tells this source from others, in all processes; None where nothing does."""
        return None

    def contents(self) -> str:
        """Return a digest of what it says of itself, where it has no identity."""
        return ""

    def name_of(self, index: int) -> str:
        """Return what an example is called on every host that has the same data: no whole path."""
        return str(index)

    @abstractmethod
    def fingerprint(self, index: int) -> Fingerprint:
        """Return what tells an example's present content from others, looked up anew."""

    def reader(self, selection: Selection | None = None) -> Reader | None:
        """Open what reads an epoch ahead of its use; None where ``fetch`` is as fast.

        ``selection``: which examples will be asked for, about in their order; None: any, in any.
        """
        return None

    def user_objects(self) -> list[UserObject]:
        """Return the objects of the user's that it calls."""
        return []

    def with_user_objects(self, objects: Sequence[Any]) -> Self:
        """Return it with others in their place, in the same order."""
        return self

    def with_own(self, reader: Reader) -> Reader:
        """Return a reader of the source that this was made from, calling this one's objects."""
        return reader

    def order(
        self,
        selection: Selection,
        seed: int,
        epoch: int,
        dealer: Dealer | None = None,
        group: int = 1,
    ) -> Order:
        """Return in what order the examples of an epoch come on this rank."""
        return selection.order(len(self), seed, epoch, dealer, group)

    def part_stats(self, order: Order, examples: int) -> tuple[PartStats, ...]:
        """Return what the first so many examples of an epoch are of, if there are parts."""
        return ()

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """Of each block that is cheap to read as a whole, the number behind its last example."""
        return None

    @property
    def rows(self) -> Rows | None:
        """What gathers whole batches, where examples lie in arrays."""
        return None

    def count(self) -> int:
        return len(self)

    def check_state(self, chain: ChainOfSource) -> None:
        """Accept every position: any example can be made again."""

    def outline(self) -> str:
        return f"{type(self).__name__} of {len(self)}"

    def extent(self, *, is_followed: bool) -> str:
        return f"{len(self):,} examples"

    def lower(self, to: SourcePlan) -> None:
        to.read(self)


def check_fields(source: Source, on: str | int | None) -> None:
    """Refuse a field that the source's examples are known not to have.

    Raises LookupError with the fields that there are.
    """
    fields = source.fields
    if on is None or fields is None:
        return
    positions = range(-len(fields), len(fields))
    if on in fields or (isinstance(on, int) and on in positions):
        return
    shown = ", ".join(repr(f) for f in fields) or "no fields: they are single arrays"
    raise pytree.FieldError(f"no field {on!r}; the examples of {source.name} have {shown}")
