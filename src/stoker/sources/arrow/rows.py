"""Rows of Arrow tables: as examples, and straight into batches.

There are two ways from a row to its values. Arrow's own ``take`` handles all types, but costs
microseconds for each row group, and shuffled rows come from many groups. If all columns are
numbers, text and bytes, values are therefore read in place (``RowGroup.columns``); only such rows
are gathered into batches. Rows with other columns go through ``take`` and ``to_examples``. Both
ways give the same values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Allocator
from stoker.schedule.numbering import Numbering
from stoker.sources.source import Indices, Rows

Kinds = dict[str, np.dtype[Any] | None]
"""By column, the dtype of numbers, and None of text and bytes."""
# Rows of a group from which on one call for all takes less than one for each. Chosen, not measured.
_MANY = 12
# Of text and bytes, which may be large: one call a group is shared by as many rows as there are.
_TOGETHER_ROWS = 1024


def to_examples(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table: dicts by column.

    Numbers are NumPy's, lists of numbers are separate arrays, text and bytes are Python's, structs
    are dicts, and null is None.
    """
    columns = [_values(column.combine_chunks()) for column in table.columns]
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(array: Any) -> list[Any]:
    import pyarrow as pa

    types = pa.types
    if isinstance(array, pa.FixedShapeTensorArray):
        there = pa.ExtensionArray.from_storage(array.type, array.storage.drop_null())
        return _placed(list(np.array(there.to_numpy_ndarray())), array)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if _is_number(kind):
        return _placed(list(array.drop_null().to_numpy(zero_copy_only=False)), array)
    if is_list(kind):
        return _lists(array)
    values: list[Any] = array.to_pylist()
    return values


def _placed(values: list[Any], array: Any) -> list[Any]:
    """Return an array's values, with None for each null."""
    if not array.null_count:
        return values
    there = iter(values)
    return [next(there) if valid else None for valid in array.is_valid().to_pylist()]


def _lists(array: Any) -> list[Any]:
    """Return an array for each list of numbers, or of lists of one shape; other lists as such.

    A list's result depends on the list and its type alone, never on the lists beside it.
    """
    lists = array.drop_null()
    inner = lists.flatten()
    empty = _empty(array.type)
    is_flat = _is_number(inner.type) and not inner.null_count
    values: Any = np.array(inner.to_numpy(zero_copy_only=False)) if is_flat else _values(inner)
    lengths = lists.value_lengths().to_pylist()
    ends = np.cumsum(lengths).tolist()
    parts = [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    if empty is not None and not is_flat:
        parts = [_joined(part, empty) for part in parts]
    return _placed(parts, array)


def _empty(kind: Any) -> NDArray[Any] | None:
    """Return what a list of such a type without values is; None where its leaves are no numbers."""
    shape: list[int] = []
    while is_list(kind):
        shape.append(getattr(kind, "list_size", 0) if shape else 0)
        kind = getattr(kind.value_type, "storage_type", kind.value_type)
    return np.empty(shape, kind.to_pandas_dtype()) if _is_number(kind) else None


def _joined(values: list[Any], empty: NDArray[Any]) -> Any:
    """Return the values of a list as one array, where they are of one shape."""
    if not values:
        return empty.copy()
    shapes = {
        np.shape(value) if isinstance(value, np.generic | np.ndarray) else None for value in values
    }
    return np.stack(values) if len(shapes) == 1 and None not in shapes else values


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def is_list(kind: Any) -> bool:
    """Whether a type is a list type, of any length."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


class RowGroup:
    """A part of a table; its buffers are not copied."""

    def __init__(self, table: Any) -> None:
        self.table = table

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes)

    @functools.cached_property
    def columns(self) -> dict[str, Any]:
        """For each column, an object with the value of each row; if the columns are of
        ``Kinds``."""
        return {
            name: _in_place(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())
            for name, column in zip(self.table.column_names, self.table.columns, strict=True)
        }


class GroupedRows(Rows):
    """Rows by number, from consecutive groups.

    Args:
        numbering: the numbers of all groups' rows.
        group: returns a group; it may read the group first.
        kinds: the columns' kinds; None if any column has another kind.
        used: called with the number of rows taken.
    """

    releases_gil = False

    def __init__(
        self,
        numbering: Numbering,
        group: Callable[[int], RowGroup],
        kinds: Kinds | None,
        used: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._numbering = numbering
        self._group = group
        self._kinds = kinds
        self._used = used

    @classmethod
    def of(cls, table: Any) -> GroupedRows:
        """Return the rows of a table in memory, by its own chunks."""
        import pyarrow as pa

        nulls = [name for name in table.column_names if table.column(name).null_count]
        batches = [batch for batch in table.to_batches() if batch.num_rows]
        groups = [RowGroup(pa.Table.from_batches([batch])) for batch in batches]
        numbering = Numbering([group.num_rows for group in groups])
        return cls(numbering, groups.__getitem__, kinds_of(table.schema, nulls))

    @property
    def are_stacked(self) -> bool:
        """Whether batches can be gathered from them."""
        return self._kinds is not None

    def examples(self, indices: Indices) -> list[dict[str, Any]]:
        """Return rows as ``to_examples`` does."""
        wanted = np.asarray(indices, np.int64)
        if self._kinds is None:
            return self._taken(wanted)
        found, rows = self._found(wanted)
        names = list(self._kinds)
        columns = [
            [columns[name][row] for columns, row in zip(found, rows, strict=True)] for name in names
        ]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def together(self, rows: int) -> int:
        if self._kinds is not None and None not in self._kinds.values():
            return super().together(rows)
        return max(1, min(16, _TOGETHER_ROWS // rows))

    def allocate(self, rows: int, recycler: Allocator) -> dict[str, Any]:
        assert self._kinds is not None
        return {
            name: [None] * rows if dtype is None else recycler.array((rows,), dtype)
            for name, dtype in self._kinds.items()
        }

    def split(self, batch: dict[str, Any], rows: int) -> list[dict[str, Any]]:
        count = len(next(iter(batch.values())))  # columns of text are lists, not leaves
        if count <= rows:
            return [batch]
        spans = [slice(start, start + rows) for start in range(0, count, rows)]
        return [{name: column[span] for name, column in batch.items()} for span in spans]

    def gather(self, indices: NDArray[np.int64], batch: dict[str, Any], start: int) -> None:
        groups, within = self._numbering.find_many(indices)
        order = np.argsort(groups, kind="stable")
        cuts = np.flatnonzero(np.diff(groups[order])) + 1
        if len(indices) < _MANY * (len(cuts) + 1):
            return self._gather_each(indices, batch, start)
        for places in np.split(order, cuts):
            group, rows = self._group(int(groups[places[0]])), within[places]
            places += start
            for name, out in batch.items():
                column = group.columns[name]
                if isinstance(out, np.ndarray):
                    out[places] = column[rows]
                else:
                    for place, value in zip(places.tolist(), column.many(rows), strict=True):
                        out[place] = value
        self._used(len(indices))

    def _gather_each(self, indices: NDArray[np.int64], batch: dict[str, Any], start: int) -> None:
        """Gather row by row, which is faster if few rows share a group."""
        found, rows = self._found(indices)
        span = slice(start, start + len(rows))
        for name, out in batch.items():
            out[span] = [columns[name][row] for columns, row in zip(found, rows, strict=True)]

    def _found(self, wanted: NDArray[np.int64]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return, of each row, the columns of its group, and its number there."""
        groups, rows = (found.tolist() for found in self._numbering.find_many(wanted))
        columns = {number: self._group(number).columns for number in dict.fromkeys(groups)}
        self._used(len(rows))
        return [columns[at] for at in groups], rows

    def _taken(self, wanted: NDArray[np.int64]) -> list[dict[str, Any]]:
        import pyarrow as pa

        groups, within = self._numbering.find_many(wanted)
        examples: list[Any] = [None] * len(wanted)
        places: list[int] = []
        rows = []
        for number in dict.fromkeys(groups.tolist()):
            there = np.flatnonzero(groups == number)
            places += there.tolist()
            rows.append(self._group(number).table.take(within[there]))
        self._used(len(wanted))
        # Made at once, for what that costs by group.
        for place, example in zip(places, to_examples(pa.concat_tables(rows)), strict=True):
            examples[place] = example
        return examples


def kinds_of(schema: Iterable[Any], with_nulls: Iterable[str]) -> Kinds | None:
    """Return the columns' kinds; None if any column has another kind.

    Args:
        schema: the columns' fields.
        with_nulls: the names of columns that may hold nulls; numbers with nulls are of another
            kind.
    """
    nulls = set(with_nulls)
    found: Kinds = {}
    for field in schema:
        kind = field.type
        if _is_text(kind):
            found[field.name] = None
        elif field.name not in nulls and _is_number(kind):
            found[field.name] = np.dtype(kind.to_pandas_dtype())
        else:
            return None
    return found or None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    is_string = types.is_string(kind) or types.is_large_string(kind)
    return bool(is_string or types.is_binary(kind) or types.is_large_binary(kind))


def _in_place(array: Any) -> Any:
    """Return an object with an array's values by row: numbers, text or bytes."""
    import pyarrow as pa

    if pa.types.is_boolean(array.type):
        return array.to_numpy(zero_copy_only=False)
    if not _is_text(array.type):  # ``to_numpy`` would import pandas
        dtype, data = array.type.to_pandas_dtype(), array.buffers()[1]
        return np.frombuffer(data or b"", dtype)[array.offset : array.offset + len(array)]
    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    # An empty array may have no buffers at all.
    ends = memoryview(offsets or bytes(8)).cast("q" if is_large else "i")
    values = (_Texts if is_text else _RaggedBytes)(
        ends[array.offset : array.offset + len(array) + 1], memoryview(data or b"")
    )
    return _WithNulls(values, array.is_valid()) if array.null_count else values


class _RaggedBytes:
    """Values of different lengths, one after another."""

    def __init__(self, ends: memoryview, data: memoryview) -> None:
        self._ends = ends
        self._data = data

    def __getitem__(self, row: int) -> Any:
        ends = self._ends
        return bytes(self._data[ends[row] : ends[row + 1]])

    def many(self, rows: NDArray[np.int64]) -> list[Any]:
        """Return the values of rows."""
        data = self._data
        return [data[begin:end].tobytes() for begin, end in self._spans(rows)]

    def _spans(self, rows: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
        ends = np.asarray(self._ends)
        return zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)


class _Texts(_RaggedBytes):
    def __getitem__(self, row: int) -> Any:
        ends = self._ends
        return str(self._data[ends[row] : ends[row + 1]], "utf-8")

    def many(self, rows: NDArray[np.int64]) -> list[Any]:
        data = self._data
        return [str(data[begin:end], "utf-8") for begin, end in self._spans(rows)]


class _WithNulls:
    """Values, and None where there is none."""

    def __init__(self, values: _RaggedBytes, is_valid: Any) -> None:
        self._values = values
        self._is_valid = is_valid.to_numpy(zero_copy_only=False)

    def __getitem__(self, row: int) -> Any:
        return self._values[row] if self._is_valid[row] else None

    def many(self, rows: NDArray[np.int64]) -> list[Any]:
        return [self[row] for row in rows.tolist()]  # a null may lie over bytes that are no text
