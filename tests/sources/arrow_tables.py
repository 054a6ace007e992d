"""Columns of Arrow tables for tests: types and their values."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

SMALL = st.integers(-9, 9)
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), SMALL),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float32": (pa.float32(), SMALL),
    "float64": (pa.float64(), st.floats(allow_nan=False)),
    "half": (pa.float16(), SMALL.map(np.float16)),
    "bool": (pa.bool_(), st.booleans()),
    "string": (pa.string(), st.text(max_size=5)),
    "long strings": (pa.large_string(), st.text(min_size=60, max_size=90)),
    "view": (pa.string_view(), st.text(max_size=15)),
    "large bytes": (pa.large_binary(), st.binary(max_size=80)),
    "date": (pa.date32(), st.dates(datetime.date(1990, 1, 1))),
    "time": (pa.timestamp("us"), st.datetimes(datetime.datetime(1990, 1, 1))),
    "decimal": (pa.decimal128(5, 2), st.decimals(-99, 99, places=2)),
    "fixed bytes": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "list": (pa.list_(pa.int16()), st.lists(SMALL, max_size=4)),
    "matrix": (
        pa.list_(pa.list_(pa.int8(), 2)),
        st.lists(st.lists(SMALL, min_size=2, max_size=2), max_size=3),
    ),
    "even list": (pa.list_(pa.int32()), st.lists(SMALL, min_size=2, max_size=2)),
    "list of nulls": (pa.list_(pa.int16()), st.lists(st.none() | SMALL, max_size=2)),
    "bools": (pa.large_list(pa.bool_()), st.lists(st.booleans(), min_size=3, max_size=3)),
    "fixed list": (pa.list_(pa.float64(), 3), st.lists(SMALL, min_size=3, max_size=3)),
    "words": (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=3), max_size=3)),
    "nested": (
        pa.large_list(pa.list_(pa.uint8())),
        st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
    ),
    "category": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", "c"])),
    "struct": (
        pa.struct({"x": pa.int8(), "y": pa.string()}),
        st.fixed_dictionaries({"x": st.none() | SMALL, "y": st.text(max_size=2)}),
    ),
    "map": (pa.map_(pa.string(), pa.int8()), st.lists(st.tuples(st.text(max_size=2), SMALL))),
    "nothing": (pa.null(), st.none()),
}


def plain(value: Any) -> Any:
    """Return a value as Arrow's ``to_pylist`` would give it."""
    if isinstance(value, np.ndarray | list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value
