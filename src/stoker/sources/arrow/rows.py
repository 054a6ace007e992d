"""Rows of Arrow tables, as examples and as batches.

Many rows are taken at a time, so that they share each call of Arrow and NumPy; only Python's own
objects are made row by row. Numbers, and lists of one length, are read as NumPy arrays where Arrow
has them; Arrow takes all others from each group of rows. (From a column of many chunks it would
take them by joining all of these first.) The values of a batch equal those of collated examples. If
they cannot be stacked, the engine collates the examples, and raises the precise error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.basics.buffers import Allocator
from stoker.basics.resources import format_bytes, usable_memory_bytes
from stoker.schedule.numbering import Numbering
from stoker.sources.arrow.examples import is_list, is_number, is_text, values_in
from stoker.sources.source import Indices, Rows

# Rows that are gathered at once, at most: 12 columns in 40 chunks take 1.3 times as long by 1,024.
_RUN_ROWS = 16_384
# The same in bytes: what is gathered stays in the CPU's caches until it is handed out.
_RUN_BYTES = 4 << 20
# Of a row, on average. Longer texts are copied once, each by itself (0.6 us), others twice.
_LONG_BYTES = 1024
# Chunks of a table are joined up to this size, half a second's copying, and up to a share of the
# memory that is free. Then rows of numbers take 0.7 of the time.
_JOINED_BYTES = 1 << 30
_JOINED_SHARE = 0.125


class TableColumns:
    """The columns of tables with one schema.

    ``are_stacked``: whether batches stack the columns: numbers, text, bytes, lists of numbers.
    ``are_plain``: whether all columns are numbers without nulls.
    """

    def __init__(self, schema: Any, with_nulls: Iterable[str]) -> None:
        self.names: list[str] = schema.names
        self.kinds: list[Any] = schema.types
        self.are_stacked = bool(self.names) and all(map(_is_stacked, self.kinds))
        nulls = set(with_nulls)
        self.are_plain = self.are_stacked and all(
            is_number(field.type) and field.name not in nulls for field in schema
        )


class RowGroup:
    """A part of a table, each column of which is one array; ``HeldBlocks`` keeps it."""

    def __init__(self, table: Any) -> None:
        self.num_rows, self.nbytes = int(table.num_rows), int(table.get_total_buffer_size())
        self._columns = [
            column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            for column in table.columns
        ]
        self._forms: dict[int, tuple[Any, NDArray[Any] | None]] = {}

    def column(self, at: int) -> Any:
        """Return a column as Arrow's array. Raises ValueError for damaged data."""
        return self._forms_of(at)[0]

    def array(self, at: int) -> NDArray[Any] | None:
        """Return a column as NumPy's array ``[rows, ...]``; None if Arrow has no such."""
        return self._forms_of(at)[1]

    def _forms_of(self, at: int) -> tuple[Any, NDArray[Any] | None]:
        forms = self._forms.get(at)
        if forms is None:
            column = _checked(self._columns[at])
            forms = self._forms[at] = column, _as_array(column)
        return forms


class GroupedRows(Rows):
    """Rows by number, from consecutive groups, which ``group`` may read first.

    ``used`` is called with the number of rows taken.
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
        self._picked: GroupedRows | None = None

    @classmethod
    def of(cls, table: Any, picked: Any = None) -> GroupedRows:
        """Return the rows of a table, or those whose numbers ``picked``, of one column, has."""
        nulls = [name for name in table.column_names if table.column(name).null_count]
        columns = TableColumns(table.schema, nulls)
        row_bytes = table.nbytes / max(1, table.num_rows)
        if _is_joined(table):
            for chunk in itertools.chain.from_iterable(each.chunks for each in table.columns):
                _checked(chunk)
            table = table.combine_chunks()
        batches = [batch for batch in table.to_batches() if batch.num_rows]
        groups = [RowGroup(pa.Table.from_batches([batch])) for batch in batches]
        numbering = Numbering([group.num_rows for group in groups])
        made = cls(numbering, groups.__getitem__, columns, row_bytes)
        made._picked = None if picked is None else cls.of(picked)
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
            name: recycler.array((rows,), np.dtype(kind.to_pandas_dtype()))
            if self._columns.are_plain
            else [None] * rows
            for name, kind in zip(self._columns.names, self._columns.kinds, strict=True)
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
        span, found = slice(start, start + len(indices)), self._find(indices)
        for at, out in enumerate(batch.values()):
            found.fill(at, out[span])

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
            picked = np.empty(len(indices), self._picked._columns.kinds[0].to_pandas_dtype())
            self._picked._find(indices).fill(0, picked)
            indices = picked.astype(np.int64)
        which, rows = self._numbering.find_many(indices)
        back = None
        if len(self._numbering.ends) > 1:
            if len(self._numbering.ends) < 1 << 16:
                which = which.astype(np.uint16)  # sorted in linear time
            order = which.argsort(kind="stable")
            which, rows, back = which[order], rows[order], np.empty_like(order)
            back[order] = np.arange(len(order))
        cuts = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(which)]
        groups = [self._group(int(which[begin])) for begin in cuts[:-1]]
        self._used(len(indices))
        spans = itertools.pairwise(cuts)
        parts = [(each, rows[slice(*span)]) for each, span in zip(groups, spans, strict=True)]
        return _Found(self._columns, parts, back, self._row_bytes)


@dataclass(eq=False, repr=False)
class _Found:
    """Rows whose groups are known.

    ``_parts``: each group, and the numbers of its rows; ``_back``: the place of each row among
    those of all parts, None where they are in order.
    """

    _columns: TableColumns
    _parts: list[tuple[RowGroup, NDArray[np.int64]]]
    _back: NDArray[np.int64] | None
    _row_bytes: float

    def examples(self, at: int) -> list[Any]:
        """Return the values of a column, as ``to_examples`` does."""
        if is_text(self._columns.kinds[at]):
            return self._texts(at)
        array = self._array(at, np.empty)
        return values_in(self._by_arrow(at)) if array is None else list(array)

    def column(self, at: int, recycler: Allocator) -> Any:
        """Return a column as an array or a list, or else as an Arrow array."""
        if is_text(self._columns.kinds[at]):
            return self._texts(at)
        array = self._array(at, recycler.array)
        return self._by_arrow(at) if array is None else array

    def fill(self, at: int, out: NDArray[Any]) -> None:
        """Copy a column of numbers without nulls into ``out``; a file's statistics may be wrong."""
        if self._array(at, lambda shape, dtype: out) is None:
            raise ValueError("there are nulls where the file says that there are none")

    def _array(
        self, at: int, new: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
    ) -> NDArray[Any] | None:
        """Return a column as an array that ``new`` made; None unless it is one in all groups."""
        arrays = [array for group, _ in self._parts if (array := group.array(at)) is not None]
        if len(arrays) < len(self._parts) or len({array.shape[1:] for array in arrays}) != 1:
            return None
        count = sum(len(rows) for _, rows in self._parts)
        out = new((count, *arrays[0].shape[1:]), arrays[0].dtype)
        by_part, end = out if self._back is None else np.empty_like(out), 0
        for array, (_, rows) in zip(arrays, self._parts, strict=True):
            begin, end = end, end + len(rows)
            # "clip" spares NumPy a look at all rows beforehand, and a buffer before ``out``.
            array.take(rows, axis=0, out=by_part[begin:end], mode="clip")
        if self._back is not None:
            by_part.take(self._back, axis=0, out=out, mode="clip")
        return out

    def _texts(self, at: int) -> list[Any]:
        if self._row_bytes <= _LONG_BYTES:
            short: list[Any] = self._by_arrow(at).to_pylist()
            return short
        values = [
            group.column(at)[row].as_py() for group, rows in self._parts for row in rows.tolist()
        ]
        return values if self._back is None else [values[at] for at in self._back.tolist()]

    def _by_arrow(self, at: int) -> Any:
        """Return a column's values, taken by Arrow from each group."""
        parts = [group.column(at).take(pa.array(rows)) for group, rows in self._parts]
        if self._back is None:
            return parts[0]
        return pa.chunked_array(parts).combine_chunks().take(pa.array(self._back))


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
    return bool(table.nbytes <= min(limit, _LONG_BYTES * table.num_rows))


def _is_stacked(kind: Any) -> bool:
    """True if a column's values become a batch without a look at each of them."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return is_number(kind.value_type) and bool(kind.shape) and kind.permutation is None
    if is_list(kind):
        return is_number(kind.value_type)
    return is_number(kind) or is_text(kind)


def _checked(array: Any) -> Any:
    """Return an array whose offsets lead nowhere else: Arrow follows them blindly."""
    kind = array.type
    if is_text(kind):
        is_large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        bytes_alone = array.view(pa.large_binary() if is_large else pa.binary())  # not their UTF-8
    elif is_list(kind):
        bytes_alone = array
    else:
        return array
    try:
        bytes_alone.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"a column of {kind} is damaged: {error}") from error
    return array


def _as_array(column: Any) -> NDArray[Any] | None:
    """Return numbers, or lists of numbers of one length, as an array ``[rows, ...]``; else None."""
    if column.null_count:
        return None
    if isinstance(column, pa.FixedShapeTensorArray):
        tensors = column.storage.flatten()
        return None if tensors.null_count else column.to_numpy_ndarray()
    if is_number(column.type):
        numbers: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return numbers
    if not is_list(column.type) or not is_number(column.type.value_type):
        return None
    inner = column.flatten()
    lengths = column.value_lengths().to_numpy()
    if inner.null_count or (lengths != lengths[:1]).any():
        return None
    shape = len(lengths), int(lengths.max(initial=0))
    return np.reshape(inner.to_numpy(zero_copy_only=False), shape)


def _part(column: Any, span: slice) -> Any:
    """Return a batch's part of a column."""
    if isinstance(column, np.ndarray | list):
        return column[span]
    array = column[span]
    if array.null_count == len(array):
        return [None] * len(array)
    numbers = _as_array(array)
    if numbers is not None:
        return numbers.copy()
    rows = values_in(array)
    shapes = {row.shape if isinstance(row, np.ndarray | np.generic) else None for row in rows}
    if len(shapes) > 1 or None in shapes:
        raise ValueError("a batch's rows cannot be stacked")
    return np.stack(rows)
