"""Rows of Arrow tables, as examples and as batches.

Columns are taken many rows at a time (``chunks``), so that many rows share each call of Arrow and
NumPy; only Python's own objects are made row by row. The values of a batch equal those of collated
examples. If they cannot be stacked, the engine collates the examples, and raises the precise error.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Allocator
from stoker.basics.resources import format_bytes, usable_memory_bytes
from stoker.images import native
from stoker.schedule.numbering import Numbering
from stoker.sources.arrow.chunks import (
    LONG_BYTES,
    NOWHERE,
    Booleans,
    Extended,
    MisalignedError,
    Numbers,
    Places,
    Sequences,
    Values,
    is_list,
    is_number,
    is_text,
    values_of,
)
from stoker.sources.arrow.examples import values_in
from stoker.sources.source import Indices, Rows

# Rows that are gathered at once, at most: 12 columns in 40 chunks take 1.3 times as long by 1,024.
_RUN_ROWS = 16_384
# The same in bytes: what is gathered stays in the CPU's caches until it is handed out.
_RUN_BYTES = 4 << 20
# Groups for each row: a list of more takes longer than sorting the rows. Chosen, not measured.
_LISTED = 16
# Rows of each group from which on Arrow's take, 7 us a call, beats taking by address.
_MANY = 64
# Rows of a single group from which on stoker-native, which fetches texts ahead, beats Arrow's take.
_FETCHED = 4_096
# Chunks of a table are joined up to this size, half a second's copying, and up to a share of the
# memory that is free. Then rows of numbers take 0.7 of the time.
_JOINED_BYTES = 1 << 30
_JOINED_SHARE = 0.125


class TableColumns:
    """The columns of tables with one schema.

    Attributes:
        names: the columns' names.
        values: takes the values of each column; None for a column that only Arrow can take.
        spans: each column's part of a group's addresses.
        are_stacked: whether batches stack the columns: numbers, text, bytes, lists of numbers.
        are_plain: whether all columns are numbers without nulls.
    """

    def __init__(self, schema: Any, with_nulls: Iterable[str]) -> None:
        self.names: list[str] = schema.names
        self.values = [values_of(kind) for kind in schema.types]
        ends = np.cumsum([0 if each is None else each.width for each in self.values]).tolist()
        self.spans = list(map(slice, [0, *ends], ends))
        self.are_stacked = bool(self.names) and all(map(_is_stacked, schema.types))
        nulls = set(with_nulls)
        self.are_plain = self.are_stacked and all(
            is_number(field.type) and field.name not in nulls for field in schema
        )


class RowGroup:
    """A part of a table. A column that cannot be read in place is copied.

    Attributes:
        num_rows, nbytes: its size; it is a ``HeldBlock``.
        columns: an Arrow array for each column.
        places: the addresses of their buffers, ``int64 [sum of all columns' widths]``.
    """

    def __init__(self, table: Any, columns: TableColumns) -> None:
        self.num_rows, self.nbytes = int(table.num_rows), int(table.get_total_buffer_size())
        self.columns = [
            column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            for column in table.columns
        ]
        places: list[int] = []
        for at, values in enumerate(columns.values):
            if values is None:
                continue
            try:
                places += values.places(self.columns[at])
            except MisalignedError:
                self.columns[at] = _copy_aligned(self.columns[at])
                places += values.places(self.columns[at])
        self.places = np.array(places, np.int64)


class GroupedRows(Rows):
    """Rows by number, from consecutive groups.

    Args:
        numbering: finds each row's group, and its number there.
        group: returns a group; it may read the group first.
        columns: the columns of the rows.
        row_bytes: the approximate size of a row.
        used: called with the number of rows taken.
    """

    releases_gil = False

    def __init__(
        self,
        numbering: Numbering,
        group: Callable[[int], RowGroup],
        columns: TableColumns,
        row_bytes: float,
        used: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._numbering = numbering
        self._group = group
        self._columns = columns
        self._row_bytes = row_bytes
        self._used = used
        self._all: tuple[list[RowGroup], Places] | None = None
        self._picked: GroupedRows | None = None

    @classmethod
    def of(cls, table: Any, picked: Any = None) -> GroupedRows:
        """Return the rows of a table. Small tables in many chunks are joined (``_is_joined``).

        ``picked``: a table with one column, the numbers of the selected rows; None: all rows.
        """
        import pyarrow as pa

        nulls = [name for name in table.column_names if table.column(name).null_count]
        columns = TableColumns(table.schema, nulls)
        row_bytes = table.nbytes / max(1, table.num_rows)
        if _is_joined(table):
            table = table.combine_chunks()
        batches = [batch for batch in table.to_batches() if batch.num_rows]
        groups = [RowGroup(pa.Table.from_batches([batch]), columns) for batch in batches]
        numbering = Numbering([group.num_rows for group in groups])
        made = cls(numbering, groups.__getitem__, columns, row_bytes)
        made._picked = None if picked is None else cls.of(picked)
        made._all = groups, _stack_places(groups)
        return made

    @property
    def are_stacked(self) -> bool:
        """True if batches can be gathered from them."""
        return self._columns.are_stacked

    def examples(self, indices: Indices) -> list[dict[str, Any]]:
        """Return rows as ``to_examples`` does."""
        found, names = self._find(np.asarray(indices, np.int64)), self._columns.names
        columns = map(found.examples, range(len(names)))
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def together(self, rows: int) -> int:
        most = min(_RUN_ROWS, _RUN_BYTES / max(1.0, self._row_bytes))
        return max(1, min(64, int(most) // rows))

    def allocate(self, rows: int, recycler: Allocator) -> dict[str, Any]:
        """Return arrays for numbers without nulls; a list for any other column."""
        return {
            name: recycler.array((rows,), values.dtype)
            if self._columns.are_plain and isinstance(values, Numbers | Booleans)
            else [None] * rows
            for name, values in zip(self._columns.names, self._columns.values, strict=True)
        }

    def split(self, batch: dict[str, Any], rows: int) -> list[dict[str, Any]]:
        """Return batches. Raises ValueError if the rows of a batch cannot be stacked."""
        count = len(next(iter(batch.values())))
        spans = [slice(start, start + rows) for start in range(0, count, rows)]
        if all(isinstance(column, np.ndarray | list) for column in batch.values()):
            return [{name: column[span] for name, column in batch.items()} for span in spans]
        return [{name: _part(column, span) for name, column in batch.items()} for span in spans]

    def gather(self, indices: NDArray[np.int64], batch: dict[str, Any], start: int) -> None:
        """Copy rows of numbers without nulls into ``batch``."""
        span = slice(start, start + len(indices))
        self._find(indices).fill([out[span] for out in batch.values()])

    def take(self, indices: NDArray[np.int64], recycler: Allocator) -> dict[str, Any]:
        """Return columns for ``split``; those that may differ between batches are Arrow arrays."""
        if self._columns.are_plain:
            plain: dict[str, Any] = super().take(indices, recycler)
            return plain
        found = self._find(indices)
        return {name: found.column(at, recycler) for at, name in enumerate(self._columns.names)}

    def data_bytes(self, batch: dict[str, Any]) -> int:
        """Return the bytes of a batch's columns; for text and bytes, those of average rows."""
        each = batch.values()
        if any(isinstance(column, list) for column in each):
            return int(len(next(iter(each))) * self._row_bytes)
        return sum(column.nbytes for column in each)

    def _find(self, indices: NDArray[np.int64]) -> _Found:
        if self._picked is not None:
            picked = self._picked._find(indices)
            indices = picked.numbers(0, np.empty(len(indices), picked.dtype(0))).astype(np.int64)
        indices = np.ascontiguousarray(indices)
        if self._all is not None and len(self._all[0]) == 1:
            return _Found(
                self._columns, *self._all, np.zeros_like(indices), indices, self._row_bytes
            )
        which, rows = self._numbering.find_many(indices)
        if self._all is not None:
            groups, places = self._all
        else:
            numbers, which = _find_distinct(which, len(self._numbering.ends))
            groups = [self._group(number) for number in numbers.tolist()]
            places = _stack_places(groups)
        self._used(len(indices))
        return _Found(self._columns, groups, places, which, rows, self._row_bytes)


@dataclass(eq=False, repr=False)
class _Found:
    """Rows whose groups are known.

    Attributes:
        columns: the columns of the rows.
        groups, places: the groups of these rows, and the addresses of each group's buffers.
        which: each row's group, by its number in ``groups``.
        rows: each row's number in its group.
        row_bytes: the approximate size of a row.
    """

    _columns: TableColumns
    _groups: Sequence[RowGroup]
    _places: Places
    _which: NDArray[np.int64]
    _rows: NDArray[np.int64]
    _row_bytes: float

    def examples(self, at: int) -> list[Any]:
        """Return the values of a column, as ``to_examples`` does."""
        values, places = self._of(at)
        if isinstance(values, Numbers | Booleans) and is_number(values.kind):
            if not _has_nulls(places):
                return list(values.numbers(places, self._which, self._rows))
        elif isinstance(values, Sequences) and not values.is_list:
            return self._texts(at, values, places)
        return values_in(self._take_column(at, values, places))

    def column(self, at: int, recycler: Allocator) -> Any:
        """Return a column as an array or a list, or else as an Arrow array."""
        values, places = self._of(at)
        if isinstance(values, Numbers | Booleans):
            if not _has_nulls(places):
                return self.numbers(at, recycler.array((len(self._rows),), values.dtype))
        elif isinstance(values, Sequences) and not values.is_list:
            return self._texts(at, values, places)
        else:
            lists = values.inner if isinstance(values, Extended) else values
            assert isinstance(lists, Sequences)
            found = lists.matrix(places, self._which, self._rows)
            if found is not None:
                shape = values.kind.shape if isinstance(values, Extended) else found.shape[1:]
                return found.reshape(len(found), *shape)
        return self._take_column(at, values, places)

    def fill(self, outs: list[NDArray[Any]]) -> None:
        """Copy all columns, which are numbers without nulls, into these arrays.

        Raises ValueError if there are nulls after all: a file's statistics may say anything.
        """
        if int(self._places[::2].max()) != NOWHERE:
            raise ValueError("there are nulls where the file says that there are none")
        library = native.library()
        if library is None:
            for at, out in enumerate(outs):
                self.numbers(at, out)
        else:  # each has two addresses: of bits that say what is null, and of its numbers
            firsts = np.ascontiguousarray(self._places[1::2])
            library.gather_items(firsts, self._which, self._rows, *outs)

    def numbers(self, at: int, out: NDArray[Any]) -> NDArray[Any]:
        """Copy numbers without nulls into ``out``, and return that."""
        values, places = self._of(at)
        assert isinstance(values, Numbers | Booleans)
        return values.numbers(places, self._which, self._rows, out)

    def dtype(self, at: int) -> np.dtype[Any]:
        """Return the dtype of a column of numbers."""
        values = self._columns.values[at]
        assert isinstance(values, Numbers | Booleans)
        return values.dtype

    def _of(self, at: int) -> tuple[Values | None, Places]:
        return self._columns.values[at], self._places[self._columns.spans[at]]

    def _texts(self, at: int, values: Sequences, places: Places) -> list[Any]:
        rows, groups = len(self._rows), len(self._groups)
        is_quick = rows >= _MANY * groups and self._row_bytes <= LONG_BYTES
        if is_quick and (native.library() is None or (groups == 1 and rows < _FETCHED)):
            texts: list[Any] = self._by_arrow(at).to_pylist()
            return texts
        return values.texts(places, self._which, self._rows)

    def _take_column(self, at: int, values: Values | None, places: Places) -> Any:
        if values is None:
            return self._by_arrow(at)
        return values.take(places, self._which, self._rows)

    def _by_arrow(self, at: int) -> Any:
        """Return a column's values, taken by Arrow from each group."""
        import pyarrow as pa

        each, back = self._by_group
        parts = [self._groups[group].columns[at].take(rows) for group, rows in each]
        if len(parts) == 1:
            return parts[0]
        return pa.chunked_array(parts).combine_chunks().take(back)

    @functools.cached_property
    def _by_group(self) -> tuple[list[tuple[int, NDArray[np.int64]]], NDArray[np.int64]]:
        """Each group with its rows, and the place of each of these among all rows."""
        which = self._which
        if len(self._groups) < 1 << 16:
            which = which.astype(np.uint16)  # sorted in linear time
        order = which.argsort(kind="stable")
        which, rows = which[order], self._rows[order]
        cuts = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(which)]
        spans = itertools.pairwise(cuts)
        each = [(int(which[begin]), rows[begin:end]) for begin, end in spans if begin < end]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return each, back


def in_chunks(table: Any) -> str:
    """Return a note for ``print`` on a table's chunks, and whether they are joined."""
    chunks = max(column.num_chunks for column in table.columns)
    if chunks == 1:
        return ""
    text = f" in {chunks:,} chunks of {format_bytes(table.nbytes)}"
    return f"{text}, which are joined in a copy" if _is_joined(table) else text


def _is_joined(table: Any) -> bool:
    """True if a table's chunks are copied into one piece; large values gain nothing by that."""
    if max(column.num_chunks for column in table.columns) == 1:
        return False
    limit = min(_JOINED_BYTES, int(usable_memory_bytes() * _JOINED_SHARE))
    return bool(table.nbytes <= min(limit, LONG_BYTES * table.num_rows))


def _is_stacked(kind: Any) -> bool:
    """True if a column's values become a batch without a look at each of them."""
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        return is_number(kind.value_type) and bool(kind.shape) and kind.permutation is None
    if is_list(kind):
        return is_number(kind.value_type)
    return is_number(kind) or is_text(kind)


def _has_nulls(places: Places) -> bool:
    return bool(places[0].max() != NOWHERE)


def _stack_places(groups: Sequence[RowGroup]) -> Places:
    return np.ascontiguousarray(np.stack([group.places for group in groups], axis=1))


def _find_distinct(
    numbers: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct numbers in ascending order, and each entry's index there.

    All numbers are below ``count``.
    """
    if count > _LISTED * len(numbers):
        found, which = np.unique(numbers, return_inverse=True)
        return found, which
    places = np.zeros(count, np.int64)
    places[numbers] = 1
    found = np.flatnonzero(places)
    places[found] = np.arange(len(found))
    return found, places.take(numbers)


def _part(column: Any, span: slice) -> Any:
    """Return a batch's part of a column."""
    if isinstance(column, np.ndarray | list):
        return column[span]
    array = column[span]
    if array.null_count == len(array):
        return [None] * len(array)
    rows = values_in(array)
    shapes = {row.shape if isinstance(row, np.ndarray | np.generic) else None for row in rows}
    if len(shapes) > 1 or None in shapes:
        raise ValueError("a batch's rows cannot be stacked")
    return np.stack(rows)


def _copy_aligned(array: Any) -> Any:
    """Return a copy in memory that Arrow allocates, which is aligned."""
    return array.take(np.arange(len(array)))
