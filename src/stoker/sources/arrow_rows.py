"""Rows of Arrow tables as examples."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

_INDEX_OF_PANDAS = re.compile(r"__index_level_\d+__")


def import_pyarrow(asked: str, module: str = "pyarrow") -> Any:
    """Import a module of the extra, or raise ImportError with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{asked} needs pyarrow: pip install 'stoker[parquet]'") from error


def is_table(data: object) -> bool:
    """Whether something is a table by its protocol: an Arrow table, or a DataFrame of any kind."""
    return hasattr(data, "__arrow_c_stream__") or hasattr(data, "__dataframe__")


def to_table(data: Any, asked: str) -> Any:
    """Return a ``pyarrow.Table`` of the same columns, without copies where that can be.

    Raises TypeError for what is no table, ValueError for what Arrow cannot make one of, and where
    two columns have one name.
    """
    pa = import_pyarrow(asked)
    if isinstance(data, pa.Table):
        table = data
    elif hasattr(data, "__arrow_c_stream__"):
        try:
            table = pa.table(data)
        except pa.ArrowInvalid as error:  # a single column, values that Arrow does not know
            kind = type(data).__name__
            raise ValueError(f"{asked}: this {kind} is no table for Arrow: {error}") from error
    elif hasattr(data, "__dataframe__"):
        table = import_pyarrow(asked, "pyarrow.interchange").from_dataframe(data)
    elif isinstance(data, pa.RecordBatch):
        table = pa.Table.from_batches([data])
    else:
        raise TypeError(
            f"{asked} takes a pyarrow.Table or a DataFrame (pandas, Polars, ...), not "
            f"{type(data).__name__}"
        )
    names = [name for name in table.column_names if not _INDEX_OF_PANDAS.fullmatch(name)]
    again = sorted({name for name in names if names.count(name) > 1})
    if again:
        raise ValueError(f"{asked}: two columns are called {again[0]!r}")
    return without_views(_without_runs(table.select(names), asked))


def _without_runs(table: Any, asked: str) -> Any:
    """Return a table whose run-end-encoded columns are decoded: Arrow takes no rows of those."""
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        if pa.types.is_run_end_encoded(field.type):
            compute = import_pyarrow(asked, "pyarrow.compute")
            try:
                column = compute.run_end_decode(table.column(place))
            except pa.ArrowNotImplementedError as error:  # of dictionaries, of views
                raise ValueError(f"{asked}: column {field.name!r}: {error}") from error
            table = table.set_column(place, field.with_type(column.type), column)
    return table


def without_views(table: Any) -> Any:
    """Return a table without views of text or bytes, which Polars has and Arrow takes no rows of.

    Those are copied; all else is the same.
    """
    import pyarrow as pa

    types = [_without_views(field.type) for field in table.schema]
    if types == table.schema.types:
        return table
    fields = map(pa.Field.with_type, table.schema, types)
    return table.cast(pa.schema(fields, table.schema.metadata))


def _without_views(kind: Any) -> Any:
    import pyarrow as pa

    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    if not _is_list(kind):
        return kind
    inner = kind.value_field.with_type(_without_views(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(inner, kind.list_size)
    return pa.large_list(inner) if types.is_large_list(kind) else pa.list_(inner)


def concatenated(tables: list[Any]) -> Any:
    """Return tables of the same columns, at least one, as one."""
    import pyarrow as pa

    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def to_examples(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table: dicts by column.

    Numbers are NumPy's, lists of numbers are arrays of their own, text and bytes are Python's,
    structs are dicts, and what is null is None.
    """
    columns = [_values(column.combine_chunks()) for column in table.columns]
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(array: Any) -> list[Any]:
    """Return the values of an array (or of the one chunk of a column)."""
    import pyarrow as pa

    types = pa.types
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
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
    if _is_list(kind):
        return _lists(array)
    values: list[Any] = array.to_pylist()
    return values


def _placed(values: list[Any], array: Any) -> list[Any]:
    """Return what is not null in an array, with None for what is."""
    if not array.null_count:
        return values
    there = iter(values)
    return [next(there) if valid else None for valid in array.is_valid().to_pylist()]


def _lists(array: Any) -> list[Any]:
    """Return an array for each list of numbers, or of lists of one shape; other lists as such.

    What a list becomes follows from it and its type alone, never from the lists beside it.
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
    while _is_list(kind):
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


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
