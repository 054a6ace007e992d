"""``SourceBase``: the beginning of a chain, as stages, chain and engine see it.

Three kinds: an ``IndexedSource`` gives any example by its number, so that order, sharing and
resuming are integers alone; a stream (``stages.iterable``) can only be read from its beginning; a
loader (``stages.loader``) yields ready batches in an order of its own. ``DatasetSource`` makes an
``IndexedSource`` of users' sources and datasets.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import landmark, rows_digest, spread
from stoker.distributed.unsharded import warn_unsharded
from stoker.errors import FieldError, StateError
from stoker.schedule.orders.order import Places
from stoker.schedule.progress import Pace
from stoker.schedule.selection import Selection
from stoker.schedule.sharding import EpochIndices
from stoker.sources.source import Indices, Source
from stoker.stats import PartStats


class UserObject(NamedTuple):
    """A user's object that a source or a stage calls."""

    name: str
    """The name of its caller, for people."""
    value: Any


class SourceBase(ABC):
    """The beginning of a chain.

    Attributes:
        yields_batches: whether it yields ready batches of a user's loader.
        is_indexed: whether any example can be read by its number.
        has_own_order: whether it decides the order of an epoch's examples itself.
        may_grow: whether ``with_current_length`` may find another length.
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
        """Return the examples (of a loader, batches) of an epoch. Raises TypeError if unknown."""

    def with_current_length(self) -> SourceBase:
        """Return this source with its current length. Raises ValueError if that must not change."""
        return self

    def examples(self, selection: Selection) -> int:
        """Return the examples (or batches) of an epoch on this rank. Raises as ``count`` does."""
        return selection.count(self.count())

    @property
    @abstractmethod
    def is_counted(self) -> bool:
        """True if an epoch is sure to end after ``count`` examples."""

    @property
    def takes_state(self) -> bool:
        """True if it has its own state to resume from."""
        return False

    def state_between(self, *, left: bool) -> Any:
        """Return its own state between epochs, None if it has none.

        A pass that was ``left`` in its middle has ended: the next epoch begins another.
        """
        return None

    def check_state(self, chain: Any) -> None:  # noqa: B027 any example can be read again
        """Raise StateError if a chain over it cannot be saved in the middle of an epoch."""

    def check_leg(self, selection: Selection) -> None:
        """Raise StateError if other ranks cannot continue in the middle of an epoch."""
        raise StateError("what was read of it is known to the ranks that read it alone")

    def drawn_before(self, selection: Selection, epoch: int) -> list[int] | None:
        """Return how many examples of each part were drawn before an epoch, for a state.

        None where arithmetic tells. Raises ValueError where finding that out takes too long.
        """
        return None

    def note_drawn(self, selection: Selection, epoch: int, drawn: list[int]) -> None:
        """Note the result of ``drawn_before`` from a state. Raises ValueError if it cannot be."""
        raise ValueError("it says what was drawn of parts, which this pipeline has none of")

    def landmarks(self) -> dict[str, str]:
        """Return what tells its order: texts of some examples, equal on hosts with the same data.

        Ranks compare them. Nothing remote is read for it, and no user's example is asked for.
        """
        return {}

    def signature(self) -> str:
        """Return the source's line of the signature that a saved state must match."""
        return type(self).__name__

    @abstractmethod
    def extent(self) -> str:
        """Return its size, as text for ``print``."""

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn if each of several ranks would get all examples."""
        if not is_sharded:
            warn_unsharded()

    def set_epoch(self, epoch: int) -> None:  # noqa: B027 (most sources need not know)
        """Set the next epoch, for a source that chooses its data by the epoch itself."""

    def lag_outputs(self) -> int | None:
        """Return how many outputs of a shared feed wait for this job; None without a feed."""
        return None

    def attribute(self, name: str) -> Any:
        """Return what the pipeline passes on, such as ``class_names``. Raises AttributeError."""
        kind = "loaders have a"
        if name == "class_names":
            kind = "folders, a ClassLabel of Hugging Face and a stoker.Source may have"
        raise AttributeError(f"only pipelines of {kind} {name}")


class IndexedSource(Source[Any], SourceBase):
    """A ``Source`` as the engine reads it: any example by its number.

    stoker's own sources inherit from it. They are safe to use from any thread, except for the
    user's objects in them that are not declared so; their length is fixed, and they draw nothing.

    Attributes:
        runs_user_code: whether reading runs the user's Python code, which may draw from global
            random generators.
        takes_many: whether ``fetch`` reads many examples in one go.
        lies_by_class: whether its examples lie class by class, as those of a folder do.
    """

    is_indexed = True
    is_counted = True
    runs_user_code: bool = False
    takes_many: bool = True
    lies_by_class: bool = False

    def __getitem__(self, index: int, /) -> Any:
        (example,) = self.fetch([index])
        return example

    @abstractmethod
    def fetch(self, indices: Indices) -> list[Any]:
        """Return the examples at these indices. An error concerns the first of them alone."""

    def read_into(self, examples: list[Any], indices: Indices) -> Exception | None:
        """Append examples up to the first error, which is returned; each is read once."""
        examples += self.fetch(indices)
        return None

    @property
    def is_numbered(self) -> bool:
        """True if an example's fingerprint is its number alone."""
        return type(self).fingerprint is Source.fingerprint

    def contents(self) -> str:
        """Return a digest of some rows, for a source without identity."""
        return rows_digest(self.fetch, len(self)) if self.is_numbered else ""

    def landmarks(self) -> dict[str, str]:
        if type(self).name_of is not Source.name_of:
            return self._names()
        if self.blocks is not None:  # of an array in chunks, each example would read a chunk
            return {}
        at = spread(len(self), 3)
        return {f"example {n}": landmark(x) for n, x in zip(at, self.fetch(at), strict=True)}

    def _names(self) -> dict[str, str]:
        """Return the names of some examples, and the sizes of three."""
        at = spread(len(self))
        names, paths = [self.name_of(n) for n in at], [self.path(n) or "" for n in at]
        if len(set(paths)) > len(set(map(os.path.basename, paths))):  # equal names in folders
            above = os.path.commonpath(paths)
            names = [os.path.relpath(path, above) for path in paths]
        # The query of a URL may be a signature, which each rank has made by itself.
        found = {f"example {n}": name.partition("?")[0] for n, name in zip(at, names, strict=True)}
        for n in [] if self.is_numbered else spread(len(self), 3):
            with contextlib.suppress(OSError):  # a file is gone: the epoch says so, or skips it
                found[f"the size of example {n}"] = str(self.fingerprint(n).size_bytes)
        return found

    def lengths(self) -> NDArray[Any] | None:
        """Return ``len`` of each example, ``[n]``, if none must be read for it; else None."""
        return None

    def user_objects(self) -> list[UserObject]:
        """Return the user's objects that it calls."""
        return []

    def order(self, selection: Selection, seed: int, epoch: int, group: int = 1) -> EpochIndices:
        """Return the order of an epoch's examples on this rank."""
        return selection.rank_order(len(self), seed, epoch, group)

    def paces(self, selection: Selection, epoch: int) -> tuple[Pace, ...]:
        """Return how examples come over an epoch, over all ranks, by part of a mixture."""
        return (Pace.even(self.places(selection)),)

    @property
    def changes_shares(self) -> bool:
        """Whether a user's function says which share of examples is of which part."""
        return False

    @property
    def parts_count(self) -> int:
        """The number of parts of a mixture; 1 for other sources."""
        return 1

    def places(self, selection: Selection) -> int:
        """Return the number of places in an epoch, over all ranks."""
        return selection.places(len(self))

    def places_of(self, numbers: range, selection: Selection, epoch: int) -> Places:
        """Return the places of numbers in an epoch's row: here they are equal."""
        return numbers

    def places_end(self, selection: Selection) -> int:
        """Return the number after the last place of an epoch."""
        return self.places(selection)

    def check_leg(self, selection: Selection) -> None:
        """Accept: any rank can read any example."""

    def part_stats(self, order: EpochIndices, examples: int) -> tuple[PartStats, ...]:
        """Return the counts of each part in the first ``examples`` examples of an epoch."""
        return ()

    def count(self) -> int:
        return len(self)

    def attribute(self, name: str) -> Any:
        if name == "class_names" and self.class_names is not None:
            return self.class_names
        return super().attribute(name)


def numbers_of(source: IndexedSource, given: Any, caller: str) -> NDArray[Any]:
    """Return a number for each example of a source, shape [n]: the user's, or those of a field.

    ``caller`` names the argument. Raises TypeError, ValueError or LookupError if they do not fit.
    """
    if isinstance(given, (str, int)):
        check_fields(source, given)
        given = source.column(given)
    numbers = np.asarray(given)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise TypeError(
            f"{caller} takes a number for each example, in an array of one dimension, or the name "
            f"of a field that has it, not {numbers.dtype} {list(numbers.shape)}"
        )
    if len(numbers) != len(source):
        raise ValueError(
            f"{caller} takes a number for each of the {len(source):,} examples of {source.name}, "
            f"in the order of the source, but got {len(numbers):,}"
        )
    return numbers


def keys_of(source: IndexedSource, given: Any, caller: str) -> NDArray[np.int64]:
    """Return whole numbers for a user's keys, equal for equal keys. Raises as ``numbers_of``."""
    keys = given if isinstance(given, (str, int)) else np.asarray(given)
    if isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "US":
        keys = np.unique(keys, return_inverse=True)[1]
    numbers = numbers_of(source, keys, caller)
    found: NDArray[np.int64] = np.unique(numbers, return_inverse=True)[1]
    return found


def check_fields(source: SourceBase, on: str | int | None) -> None:
    """Raise LookupError, which names the fields, if a source's examples do not have this one."""
    fields = source.fields
    if on is None or fields is None:
        return
    positions = range(-len(fields), len(fields))
    if on in fields or (isinstance(on, int) and on in positions):
        return
    shown = ", ".join(repr(f) for f in fields) or "no fields: they are single arrays"
    raise FieldError(f"no field {on!r}; the examples of {source.name} have {shown}")
