"""A source whose examples carry their number in one more field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Allocator
from stoker.schedule.dealing import RankOrder
from stoker.schedule.orders.order import Places
from stoker.schedule.progress import Pace
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource, SourceOver
from stoker.sources.source import Indices, Reader, Rows
from stoker.stats import PartStats


class NumberedSource(SourceOver):
    """Another source, with each example's number as one more field (see ``pytree.with_field``).

    Args:
        within: the source.
        field: the name of the field.
    """

    def __init__(self, within: IndexedSource, field: str) -> None:
        super().__init__([within])
        self.within, self.field = within, field
        self.has_own_order = within.has_own_order
        self.may_grow = within.may_grow
        self.prefers_blocks = within.prefers_blocks
        self.takes_many = within.takes_many

    @property
    def name(self) -> str:
        return f"{self.within.name}.numbered({self.field!r})"

    @property
    def is_numbered(self) -> bool:
        return self.within.is_numbered

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

    def examples(self, selection: Selection) -> int:
        return self.within.examples(selection)

    def count(self) -> int:
        return self.within.count()

    def check_state(self, chain: Any) -> None:
        self.within.check_state(chain)

    def check_leg(self, selection: Selection) -> None:
        self.within.check_leg(selection)

    def signature(self) -> str:
        return f"{self.within.signature()} numbered {self.field!r}"

    def extent(self) -> str:
        return self.within.extent()

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

    def drawn_before(self, selection: Selection, epoch: int) -> list[int] | None:
        return self.within.drawn_before(selection, epoch)

    def note_drawn(self, selection: Selection, epoch: int, drawn: list[int]) -> None:
        self.within.note_drawn(selection, epoch, drawn)

    def landmarks(self) -> dict[str, str]:
        return self.within.landmarks()

    def contents(self) -> str:
        return self.within.contents()

    def reader(self, selection: Selection | None = None) -> Reader | None:
        reader = self.within.reader(selection)
        return None if reader is None else _NumberedReader(self, reader)

    def order(self, selection: Selection, seed: int, epoch: int, group: int = 1) -> RankOrder:
        return self.within.order(selection, seed, epoch, group)

    @property
    def parts_count(self) -> int:
        return self.within.parts_count

    def places(self, selection: Selection) -> int:
        return self.within.places(selection)

    def places_of(self, numbers: range, selection: Selection, epoch: int) -> Places:
        return self.within.places_of(numbers, selection, epoch)

    def places_end(self, selection: Selection) -> int:
        return self.within.places_end(selection)

    def paces(self, selection: Selection, epoch: int) -> tuple[Pace, ...]:
        return self.within.paces(selection, epoch)

    @property
    def changes_shares(self) -> bool:
        return self.within.changes_shares

    def part_stats(self, order: RankOrder, examples: int) -> tuple[PartStats, ...]:
        return self.within.part_stats(order, examples)

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        return self.within.blocks

    @property
    def rows(self) -> Rows | None:
        rows = self.within.rows
        return None if rows is None else _NumberedRows(rows, self.field)


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
