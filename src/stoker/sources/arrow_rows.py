"""Rows of Arrow tables as examples."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np

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

    Raises TypeError for what is no table, ValueError where two columns have one name.
    """
    pa = import_pyarrow(asked)
    if isinstance(data, pa.Table):
        table = data
    elif hasattr(data, "__arrow_c_stream__"):
        table = pa.table(data)
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
    return table.select(names)


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
    if isinstance(array, pa.FixedShapeTensorArray) and not array.null_count:
        return list(np.array(array.to_numpy_ndarray()))
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        if not array.null_count:
            return list(array.to_numpy(zero_copy_only=False))
        there = array.is_valid().to_pylist()
        numbers = array.fill_null(False if types.is_boolean(kind) else 0)
        numbers = numbers.to_numpy(zero_copy_only=False)
        return [one if valid else None for one, valid in zip(numbers, there, strict=True)]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _lists(array)
    values: list[Any] = array.to_pylist()
    return values


def _lists(array: Any) -> list[Any]:
    """Return an array for each list of numbers, or of lists of one shape; other lists as such."""
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).tolist()
    inner = array.flatten()  # without what null lists have behind them
    values: Any = _values(inner)
    stacked = _stacked(values, inner)
    values = values if stacked is None else stacked
    ends = np.cumsum(lengths).tolist()
    lists: list[Any] = [
        values[end - length : end] for end, length in zip(ends, lengths, strict=True)
    ]
    if array.null_count:
        valid = array.is_valid().to_pylist()
        lists = [each if there else None for each, there in zip(lists, valid, strict=True)]
    return lists


def _stacked(values: list[Any], array: Any) -> Any:
    """Return one writable array of all values, or None where they are none of one shape."""
    import pyarrow as pa

    kind = array.type
    if array.null_count:
        return None
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.array(array.to_numpy(zero_copy_only=False))
    shapes = {value.shape if isinstance(value, np.ndarray) else None for value in values}
    return np.stack(values) if len(shapes) == 1 and None not in shapes else None
