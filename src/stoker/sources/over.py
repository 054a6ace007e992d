"""Sources over others: their examples one after another, paired, or with their numbers."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Allocator, Recycler
from stoker.basics.fingerprint import Fingerprint
from stoker.basics.signals import pass_on
from stoker.schedule.numbering import Numbering
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource, UserObject
from stoker.sources.source import Indices, Reader, Rows


class _OverSeveral(IndexedSource):
    """A source over others. Their lengths are those that it began with.

    ``kind`` tells it from a source that numbers the same examples in another way.
    """

    caller: str
    kind: str

    def __init__(self, sources: Sequence[IndexedSource]) -> None:
        self.sources = tuple(sources)
        self.runs_user_code = any(source.runs_user_code for source in sources)
        self.takes_many = all(source.takes_many for source in sources)

    @property
    def name(self) -> str:
        return f"{self.caller}({', '.join(source.name for source in self.sources)})"

    def signature(self) -> str:
        return f"{self.caller} of {', '.join(source.signature() for source in self.sources)}"

    def with_current_length(self) -> IndexedSource:
        for number, source in enumerate(self.sources, 1):
            if source.with_current_length() is not source:
                raise ValueError(
                    f"{self.name}: part {number}, {source.name}, had {len(source):,} examples when "
                    "the pipeline was built, but has another number now, so examples would have "
                    "other numbers: build it again"
                )
        return self

    def identity(self) -> str | None:
        """Return the identities of the sources, if all have one."""
        each = [source.identity() for source in self.sources]
        known = [identity for identity in each if identity is not None]
        return "\0".join([self.kind, *known]) if len(known) == len(each) else None

    def landmarks(self) -> dict[str, str]:
        each = [source.landmarks() for source in self.sources]
        return {f"{at} of part {n}": own[at] for n, own in enumerate(each, 1) for at in own}

    def contents(self) -> str:
        return "\0".join(source.identity() or source.contents() for source in self.sources)

    def user_objects(self) -> list[UserObject]:
        return [each for source in self.sources for each in source.user_objects()]

    @abstractmethod
    def read_by(
        self, each: Sequence[Any], examples: list[Any], indices: Indices
    ) -> Exception | None: ...

    def read_into(self, examples: list[Any], indices: Indices) -> Exception | None:
        return self.read_by(self.sources, examples, indices)


class SourceOver(_OverSeveral):
    """A source over others, whose examples follow each other; each is asked for its own."""

    kind = "mix"  # mixed or joined: examples have the same numbers

    def __init__(self, sources: Sequence[IndexedSource]) -> None:
        super().__init__(sources)
        self._numbering = Numbering([len(source) for source in sources])

    def __len__(self) -> int:
        return self._numbering.total

    def find(self, index: int) -> tuple[int, int]:
        """Return the number of an example's source, and its index there."""
        return self._numbering.find(index)

    @property
    def fields(self) -> Sequence[str | int] | None:
        """The fields that all parts are known to have, if they have the same."""
        fields = [source.fields for source in self.sources]
        known = [None if each is None else tuple(each) for each in fields]
        return known[0] if all(each == known[0] for each in known) else None

    def fetch(self, indices: Indices) -> list[Any]:
        return self.merge(indices, self.sources)

    def merge(self, indices: Indices, each: Sequence[Reader | IndexedSource]) -> list[Any]:
        """Fetch examples from what reads each part; return them in the order of their indices."""
        if len(indices) == 1:
            number, own_index = self.find(int(indices[0]))
            return each[number].fetch([own_index])
        examples: list[Any] = [None] * len(indices)
        for part, (at, own) in zip(each, self.split_by_part(indices), strict=True):
            if len(own):
                for place, example in zip(at.tolist(), part.fetch(own), strict=True):
                    examples[place] = example
        return examples

    def split(self, indices: Indices) -> list[tuple[int, Indices]]:
        """Return the parts that these examples are in, each with its own indices."""
        each = self.split_by_part(indices)
        return [(number, own) for number, (_, own) in enumerate(each) if len(own)]

    def read_by(
        self, each: Sequence[Any], examples: list[Any], indices: Indices
    ) -> Exception | None:
        """Append examples by what reads each part, as ``read_into`` does."""
        fetched: dict[int, Any] = {}
        for part, (at, own) in zip(each, self.split_by_part(indices), strict=True):
            if len(own) and (found := _fetch_together(part, own)) is not None:
                fetched.update(zip(at.tolist(), found, strict=True))
        for place, index in enumerate(np.asarray(indices).tolist()):
            if place in fetched:
                examples.append(fetched[place])
                continue
            number, own_index = self.find(index)
            if (error := _read_one(each[number], examples, own_index)) is not None:
                return error
        return None

    def by_part(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
        """Sort indices by their parts, each part's as they were.

        Returns each one's former place, its index in its part, and the end of each part.
        """
        numbers = self._numbering.parts(indices).astype(np.min_scalar_type(len(self.sources)))
        places = numbers.argsort(kind="stable")  # of two bytes at most, in linear time
        numbers = numbers[places]
        own = indices[places] - self._numbering.starts[numbers]
        ends: list[int] = numbers.searchsorted(np.arange(len(self.sources)), "right").tolist()
        return places, own, ends

    def split_by_part(self, indices: Indices) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return, for each part, where its examples are in ``indices``, and their own indices."""
        places, own, ends = self.by_part(np.asarray(indices, np.int64))
        spans = list(map(slice, [0, *ends], ends))
        return [(places[span], own[span]) for span in spans]

    def reader(self, selection: Selection | None = None) -> Reader | None:
        readers = [source.reader(own) for source, own in self.read_of(selection)]
        return _ReaderOver(self, self.sources, readers, sum) if any(readers) else None

    def read_of(
        self, selection: Selection | None
    ) -> Iterable[tuple[IndexedSource, Selection | None]]:
        """Return the examples of each source that are read, about in their order."""
        return [(source, None) for source in self.sources]

    @property
    def rows(self) -> Rows | None:
        """The rows of all parts, if they have the same form."""
        each = [source.rows for source in self.sources]
        known = [rows for rows in each if rows is not None]
        forms = {_form(rows) for rows in known}
        if len(known) < len(each) or len(forms) > 1 or None in forms:
            return None
        return known[0].concatenate(known[1:]) or _RowsOver(self, known)

    def name_of(self, index: int) -> str:
        number, own = self.find(index)
        return f"{number}/{self.sources[number].name_of(own)}"

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the fingerprint of the part's example, with the part's number in its name."""
        number, own = self.find(index)
        found = self.sources[number].fingerprint(own)
        if isinstance(found.name, bytes):
            return found._replace(name=b"%d/%b" % (number, found.name))
        return found._replace(name=f"{number}/{found.name}")

    def path(self, index: int) -> str | None:
        number, own = self.find(index)
        return self.sources[number].path(own)

    def local_path(self, index: int) -> str | None:
        number, own = self.find(index)
        return self.sources[number].local_path(own)

    def column(self, field: str | int) -> NDArray[Any]:
        return np.concatenate([source.column(field) for source in self.sources])

    def lengths(self) -> NDArray[Any] | None:
        known = [own for source in self.sources if (own := source.lengths()) is not None]
        return np.concatenate(known) if len(known) == len(self.sources) else None

    def labels(self, field: str | int | None = None) -> NDArray[Any]:
        return np.concatenate([source.labels(field) for source in self.sources])

    def attribute(self, name: str) -> Any:
        """Return an attribute of the sources, if it is the same in all."""
        each = [source.attribute(name) for source in self.sources]
        if any(one != each[0] for one in each):
            raise AttributeError(f"the parts of {self.name} differ in their {name}")
        return each[0]


class ConcatSource(SourceOver):
    """The examples of several sources, one source after another."""

    caller = "concat"

    def __init__(self, sources: Sequence[IndexedSource]) -> None:
        super().__init__(sources)
        self.prefers_blocks = all(source.prefers_blocks for source in sources)

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """The blocks of all parts; None if one has none."""
        each = [source.blocks for source in self.sources]
        found = [
            ends + start
            for ends, start in zip(each, self._numbering.starts, strict=True)
            if ends is not None
        ]
        return np.concatenate(found) if len(found) == len(each) else None


class PairedSource(_OverSeveral):
    """The examples of sources of one length, as tuples: the ones of each number together."""

    caller = kind = "zip"
    prefers_blocks = False

    def __init__(self, sources: Sequence[IndexedSource]) -> None:
        super().__init__(sources)
        first = sources[0]
        for other in sources:
            if len(other) != len(first):
                raise ValueError(
                    f"zip() pairs examples by number, but {first.name} has {len(first):,} and "
                    f"{other.name} {len(other):,}"
                )

    @property
    def fields(self) -> Sequence[str | int]:
        return range(len(self.sources))

    def __len__(self) -> int:
        return len(self.sources[0])

    def fetch(self, indices: Indices) -> list[Any]:
        return self.merge(indices, self.sources)

    def merge(self, indices: Indices, each: Sequence[Reader | IndexedSource]) -> list[Any]:
        """Fetch the same examples from what reads each source; return them paired."""
        return list(zip(*(one.fetch(indices) for one in each), strict=True))

    def split(self, indices: Indices) -> list[tuple[int, Indices]]:
        """Return all sources, each with the same indices."""
        return [(number, indices) for number in range(len(self.sources))]

    def read_by(
        self, each: Sequence[Any], examples: list[Any], indices: Indices
    ) -> Exception | None:
        """Append examples by what reads each source, as ``read_into`` does."""
        columns = [_fetch_together(one, indices) for one in each]
        for row, index in enumerate(np.asarray(indices).tolist()):
            parts: list[Any] = []
            for one, column in zip(each, columns, strict=True):
                if column is not None:
                    parts.append(column[row])
                elif (error := _read_one(one, parts, index)) is not None:
                    return error
            examples.append(tuple(parts))
        return None

    def reader(self, selection: Selection | None = None) -> Reader | None:
        readers = [source.reader(selection) for source in self.sources]
        return _ReaderOver(self, self.sources, readers, max) if any(readers) else None

    def path(self, index: int) -> str | None:
        paths = [source.path(index) for source in self.sources]
        return " and ".join(path for path in paths if path is not None) or None

    def name_of(self, index: int) -> str:
        return self.sources[0].name_of(index)

    def fingerprint(self, index: int) -> Fingerprint:
        """Return a fingerprint that tells those of all sources."""
        return Fingerprint(repr([tuple(source.fingerprint(index)) for source in self.sources]))


class _ReaderOver:
    """The readers of the sources that a source is over; what has none is read when it is fetched.

    Args:
        source: the one over them.
        sources, readers: those that it is over, and the readers of them.
        total: how many reads may be under way in all, of each reader's.
    """

    def __init__(
        self,
        source: SourceOver | PairedSource | NumberedSource,
        sources: Sequence[IndexedSource],
        readers: Sequence[Reader | None],
        total: Callable[[Iterable[int]], int],
    ) -> None:
        self._source, self._readers = source, readers
        self._each = [reader or one for reader, one in zip(readers, sources, strict=True)]
        self._open = [reader for reader in readers if reader is not None]
        self.requests = total(reader.requests for reader in self._open)
        self.takes_many = source.takes_many

    def expect(self, indices: Indices) -> None:
        for number, own in self._source.split(indices):
            reader = self._readers[number]
            if reader is not None:
                reader.expect(own)

    def fetch(self, indices: Indices) -> list[Any]:
        return self._source.merge(indices, self._each)

    def read_into(self, examples: list[Any], indices: Indices) -> Exception | None:
        return self._source.read_by(self._each, examples, indices)

    def close(self) -> None:
        with contextlib.ExitStack() as rest:
            for reader in self._open:
                rest.callback(reader.close)


class _RowsOver(Rows):
    """Gathers the rows of each part into their places in a batch."""

    def __init__(self, source: SourceOver, rows: Sequence[Rows]) -> None:
        self._source = source
        self._rows = rows
        self._recycler = Recycler()
        self.releases_gil = all(each.releases_gil for each in rows)

    def allocate(self, rows: int, recycler: Allocator) -> Any:
        return self._rows[0].allocate(rows, recycler)

    def split(self, batch: Any, rows: int) -> list[Any]:
        return self._rows[0].split(batch, rows)

    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        places, own, ends = self._source.by_part(indices)
        gathered, begin = self._rows[0].allocate(len(own), self._recycler), 0
        for rows, end in zip(self._rows, ends, strict=True):
            if end - begin == len(own):
                return rows.gather(own, batch, start)
            if end > begin:
                rows.gather(own[begin:end], gathered, begin)
            begin = end
        back = np.empty_like(places)
        back[places] = np.arange(len(places))
        stop = start + len(indices)
        for out, found in zip(pytree.leaves(batch), pytree.leaves(gathered), strict=True):
            found.take(back, axis=0, out=out[start:stop], mode="clip")  # see MemoryColumn


def _takes_many(part: Any) -> bool:
    """Whether a source, or what reads one, may be asked for several at once, and again."""
    found: bool = getattr(part, "takes_many", True)
    return found


def _fetch_together(part: Any, indices: Indices) -> list[Any] | None:
    """Return examples of a part; None if each is to be asked for alone, and once."""
    if _takes_many(part):
        try:
            found: list[Any] = part.fetch(indices)
        except Exception as error:
            pass_on(error)
        else:
            return found if len(found) == len(indices) else None
    return None


def _read_one(part: Any, examples: list[Any], index: int) -> Exception | None:
    """Append one example of a part, or return why not."""
    try:
        if not _takes_many(part):
            error: Exception | None = part.read_into(examples, [index])
            return error
        found = part.fetch([index])
        if len(found) != 1:
            raise ValueError(f"{len(found)} examples came, and 1 was asked for")
        examples += found
    except Exception as error:
        pass_on(error)
        return error
    return None


def _form(rows: Rows) -> str | None:
    """Return a batch's structure, dtypes and shapes of rows; None if a leaf is not an array."""
    batch = rows.allocate(1, Recycler())
    if not all(isinstance(leaf, np.ndarray) for leaf in pytree.leaves(batch)):
        return None
    leaves = [(leaf.dtype.str, leaf.shape) for leaf in pytree.leaves(batch)]
    return repr((pytree.structure(batch), leaves))


class NumberedSource(IndexedSource):
    """Another source, with each example's number as one more field (see ``pytree.with_field``)."""

    def __init__(self, within: IndexedSource, field: str) -> None:
        self.within, self.field = within, field

    def __len__(self) -> int:
        return len(self.within)

    @property
    def name(self) -> str:
        return f"{self.within.name}.with_index({self.field!r})"

    @property
    def fields(self) -> Sequence[str | int] | None:
        fields = self.within.fields
        if fields is None:
            return None
        if all(isinstance(field, int) for field in fields):
            return list(range(max(1, len(fields)) + 1))
        return [*fields, self.field]

    def with_current_length(self) -> IndexedSource:
        within = self.within.with_current_length()
        assert isinstance(within, IndexedSource)
        return self if within is self.within else NumberedSource(within, self.field)

    def signature(self) -> str:
        return f"{self.within.signature()} numbered {self.field!r}"

    def fetch(self, indices: Indices) -> list[Any]:
        return self.merge(indices, [self.within])

    def merge(self, indices: Indices, each: Sequence[Reader | IndexedSource]) -> list[Any]:
        """Fetch examples from the one that reads them; return them with their numbers."""
        examples = each[0].fetch(indices)
        if len(examples) != len(indices):
            return examples  # as many as were not asked for: the caller says so
        field = self.field
        numbers = [int(index) for index in indices]
        return [
            pytree.with_field(example, field, number)
            for example, number in zip(examples, numbers, strict=True)
        ]

    def split(self, indices: Indices) -> list[tuple[int, Indices]]:
        """Return the source, with the same indices."""
        return [(0, indices)]

    def read_into(self, examples: list[Any], indices: Indices) -> Exception | None:
        return self.read_by([self.within], examples, indices)

    def read_by(
        self, each: Sequence[Any], examples: list[Any], indices: Indices
    ) -> Exception | None:
        """Append examples by what reads them, as ``read_into`` does."""
        read: list[Any] = []
        error: Exception | None = each[0].read_into(read, indices)
        for example, index in zip(read, indices, strict=False):
            try:
                examples.append(pytree.with_field(example, self.field, int(index)))
            except ValueError as clash:
                return clash
        return error

    def identity(self) -> str | None:
        within = self.within.identity()
        return None if within is None else f"{within}\0numbered {self.field}"

    def reader(self, selection: Selection | None = None) -> Reader | None:
        reader = self.within.reader(selection)
        return None if reader is None else _ReaderOver(self, [self.within], [reader], max)

    @property
    def rows(self) -> Rows | None:
        rows = self.within.rows
        return None if rows is None else _NumberedRows(rows, self.field)


# What its order follows from, and what is known of the examples: numbers change nothing of it.
for _name in (
    *("has_own_order", "may_grow", "prefers_blocks", "takes_many", "blocks", "count", "examples"),
    *("order", "places", "places_of", "places_end", "paces", "part_stats", "parts_count"),
    *("changes_shares", "drawn_before", "note_drawn", "check_leg", "check_state"),
    *("lies_by_class", "is_numbered", "landmarks", "contents", "extent", "user_objects"),
    "runs_user_code",
    *("path", "local_path", "name_of", "fingerprint", "column", "labels", "attribute"),
):
    setattr(NumberedSource, _name, property(attrgetter(f"within.{_name}")))


class _NumberedRows(Rows):
    """Rows with their numbers, which are kept beside the batch until it is split."""

    def __init__(self, within: Rows, field: str) -> None:
        self._within, self._field = within, field
        self.releases_gil = within.releases_gil

    def allocate(self, rows: int, recycler: Allocator) -> Any:
        numbers = recycler.array((rows,), np.dtype(np.int64))
        return {"": self._within.allocate(rows, recycler), self._field: numbers}

    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        self._within.gather(indices, batch[""], start)
        batch[self._field][start : start + len(indices)] = indices

    def split(self, batch: Any, rows: int) -> list[Any]:
        numbers = batch[self._field]
        return [
            pytree.with_field(each, self._field, numbers[at * rows : (at + 1) * rows])
            for at, each in enumerate(self._within.split(batch[""], rows))
        ]

    def together(self, rows: int) -> int:
        return self._within.together(rows)

    def data_bytes(self, batch: Any) -> int:
        return self._within.data_bytes(batch[""])
