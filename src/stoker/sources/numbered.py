"""A source whose examples carry their number in one more field."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Allocator
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource
from stoker.sources.source import Indices, Reader, Rows


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
        return self.add_numbers(self.within.fetch(indices), indices)

    def read_into(self, examples: list[Any], indices: Indices) -> Exception | None:
        read: list[Any] = []
        error = self.within.read_into(read, indices)
        for example, index in zip(read, indices, strict=False):
            try:
                examples.append(pytree.with_field(example, self.field, int(index)))
            except ValueError as clash:
                return clash
        return error

    def add_numbers(self, examples: list[Any], indices: Indices) -> list[Any]:
        if len(examples) != len(indices):
            return examples  # as many as were not asked for: the caller says so
        field = self.field
        numbers = [int(index) for index in indices]
        return [
            pytree.with_field(example, field, number)
            for example, number in zip(examples, numbers, strict=True)
        ]

    def identity(self) -> str | None:
        within = self.within.identity()
        return None if within is None else f"{within}\0numbered {self.field}"

    def reader(self, selection: Selection | None = None) -> Reader | None:
        reader = self.within.reader(selection)
        return None if reader is None else _NumberedReader(self, reader)

    @property
    def rows(self) -> Rows | None:
        rows = self.within.rows
        return None if rows is None else _NumberedRows(rows, self.field)


# What its order follows from, and what is known of the examples: numbers change nothing of it.
for _name in (
    *("has_own_order", "may_grow", "prefers_blocks", "takes_many", "blocks", "count", "examples"),
    *("order", "places", "places_of", "places_end", "paces", "part_stats", "parts_count"),
    *("changes_shares", "drawn_before", "note_drawn", "check_leg", "check_state"),
    *(
        "lies_by_class",
        "is_numbered",
        "landmarks",
        "contents",
        "extent",
        "runs_user_code",
        "user_objects",
    ),
    *("path", "local_path", "name_of", "fingerprint", "column", "labels", "attribute"),
):
    setattr(NumberedSource, _name, property(attrgetter(f"within.{_name}")))


class _NumberedReader:
    """A reader of a source whose examples carry their numbers."""

    def __init__(self, source: NumberedSource, within: Reader) -> None:
        self._source, self.within = source, within
        self.requests = within.requests

    def expect(self, indices: Indices) -> None:
        self.within.expect(indices)

    def fetch(self, indices: Indices) -> list[Any]:
        return self._source.add_numbers(self.within.fetch(indices), indices)

    def close(self) -> None:
        self.within.close()


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
