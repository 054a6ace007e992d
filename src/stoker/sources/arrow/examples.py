"""Converts values of Arrow arrays to values of examples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.sources.arrow.chunks import is_list, is_number


def to_examples(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table: dicts by column.

    Numbers are NumPy's, lists of numbers are separate arrays, text and bytes are Python's, structs
    are dicts, and null is None.
    """
    columns = [values_in(column.combine_chunks()) for column in table.columns]
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def values_in(array: Any) -> list[Any]:
    """Return an array's values, as in the rows of ``to_examples``."""
    import pyarrow as pa

    types = pa.types
    if isinstance(array, pa.FixedShapeTensorArray):
        there = pa.ExtensionArray.from_storage(array.type, array.storage.drop_null())
        return _with_nulls(list(np.array(there.to_numpy_ndarray())), array)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if is_number(kind):
        return _with_nulls(list(array.drop_null().to_numpy(zero_copy_only=False)), array)
    if is_list(kind):
        return _lists(array)
    values: list[Any] = array.to_pylist()
    return values


def _with_nulls(values: list[Any], array: Any) -> list[Any]:
    """Return an array's values, with None for each null."""
    if not array.null_count:
        return values
    there = iter(values)
    return [next(there) if valid else None for valid in array.is_valid().to_pylist()]


def _lists(array: Any) -> list[Any]:
    """Return an array for each list of numbers, or of lists of one shape; other lists stay lists.

    The result for a list depends only on the list and its type, never on its neighbours.
    """
    lists = array.drop_null()
    inner = lists.flatten()
    empty = _empty_list(array.type)
    is_flat = is_number(inner.type) and not inner.null_count
    values: Any = np.array(inner.to_numpy(zero_copy_only=False)) if is_flat else values_in(inner)
    lengths = lists.value_lengths().to_pylist()
    ends = np.cumsum(lengths).tolist()
    parts = [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    if empty is not None and not is_flat:
        parts = [_join_lists(part, empty) for part in parts]
    return _with_nulls(parts, array)


def _empty_list(kind: Any) -> NDArray[Any] | None:
    """Return the result for an empty list of this type; None if its leaves are not numbers."""
    shape: list[int] = []
    while is_list(kind):
        shape.append(getattr(kind, "list_size", 0) if shape else 0)
        kind = getattr(kind.value_type, "storage_type", kind.value_type)
    return np.empty(shape, kind.to_pandas_dtype()) if is_number(kind) else None


def _join_lists(values: list[Any], empty: NDArray[Any]) -> Any:
    """Return a list's values as one array, if they have one shape."""
    if not values:
        return empty.copy()
    shapes = {
        np.shape(value) if isinstance(value, np.generic | np.ndarray) else None for value in values
    }
    return np.stack(values) if len(shapes) == 1 and None not in shapes else values
