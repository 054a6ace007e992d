"""Converts values of Arrow arrays to values of examples."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types


def to_examples(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table: dicts by column.

    Numbers are NumPy's, lists of numbers are separate arrays, text and bytes are Python's, structs
    are dicts, JSON is its value, and null is None.
    """
    columns = [values_in(column.combine_chunks()) for column in table.columns]
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def values_in(array: Any) -> list[Any]:
    """Return an array's values, as in the rows of ``to_examples``."""
    if isinstance(array, pa.FixedShapeTensorArray):
        there = pa.ExtensionArray.from_storage(array.type, array.storage.drop_null())
        return _with_nulls(list(np.array(there.to_numpy_ndarray())), array)
    if isinstance(array, pa.ExtensionArray):
        values = values_in(array.storage)
        if array.type.extension_name == "arrow.json":
            return [None if value is None else json.loads(value) for value in values]
        return values
    kind = array.type
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if is_number(kind):
        return _with_nulls(list(array.drop_null().to_numpy(zero_copy_only=False)), array)
    if is_list(kind):
        return _lists(array)
    if types.is_map(kind):
        return _maps(array)
    if types.is_struct(kind):
        return _structs(array)
    plain: list[Any] = array.to_pylist()
    return plain


def is_number(kind: Any) -> bool:
    """True if a type is of numbers, booleans included."""
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def is_text(kind: Any) -> bool:
    """True if a type is of text or bytes."""
    is_string = types.is_string(kind) or types.is_large_string(kind)
    return bool(is_string or types.is_binary(kind) or types.is_large_binary(kind))


def is_list(kind: Any) -> bool:
    """True if a type is a list type, of any length."""
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _with_nulls(values: list[Any], array: Any) -> list[Any]:
    """Return an array's values, with None for each null."""
    if not array.null_count:
        return values
    there = iter(values)
    return [next(there) if valid else None for valid in array.is_valid().to_pylist()]


def _structs(array: Any) -> list[Any]:
    there = array.drop_null()
    names = [field.name for field in array.type]
    if not 0 < len({*names}) == len(names):  # without fields, or refused by Arrow
        return list(array.to_pylist())
    fields = [values_in(there.field(at)) for at in range(len(names))]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*fields, strict=True)]
    return _with_nulls(rows, array)


def _maps(array: Any) -> list[Any]:
    """Return a list of pairs for each map."""
    there = array.drop_null()
    ends = there.offsets.to_pylist()
    first, last = ends[0], ends[-1]
    columns = values_in(there.keys[first:last]), values_in(there.items[first:last])
    pairs = list(zip(*columns, strict=True))
    spans = itertools.pairwise(ends)
    return _with_nulls([pairs[begin - first : end - first] for begin, end in spans], array)


def _lists(array: Any) -> list[Any]:
    """Return an array for each list of numbers, or of lists of one shape; others stay lists.

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
