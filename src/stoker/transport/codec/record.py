"""The format of a record: one value as bytes.

A record is a head, then contents. The head holds the lengths of its two parts (4 bytes each), the
schema (MessagePack: how the value is nested, and the types), and the numbers (MessagePack: small
values, lengths and shapes, in order). The contents are byte strings and the memory of arrays and
tensors, in the schema's order. No offsets are stored, so none can be wrong.
Records of one kind have the same schema, so its reader is built once. A byte string that is not
nested has an empty schema and no numbers.

Dtypes are of numbers, texts, bytes and times alone: elements of others are pointers, or have no
bytes, so a sender could make this process read any memory, or allocate without end. Named tuples
and dataclasses are found by name among what is imported already.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import struct
import sys
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from stoker.basics.pytree import longer

LENGTHS = struct.Struct("<II")
# An empty schema and no numbers: the bytes themselves follow.
BYTES_HEAD = LENGTHS.pack(0, 0)
# The deepest nesting. Each level takes three nested calls, and Python allows 1,000.
MAX_DEPTH = 100
# The most elements of zero bytes in one array. Nothing else in a record bounds their number, so a
# damaged record could ask for any.
MAX_EMPTY_ELEMENTS = 1 << 16
# Classes made here for named tuples that this process has not imported. Without a limit, damaged
# records could fill the memory with classes.
_MAX_MADE_CLASSES = 256
_PLAIN_DTYPE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9A-Za-z]{1,12}\])?")
# The last code point of Unicode. NumPy text may hold larger numbers; a Python string cannot.
_MAX_CODE_POINT = 0x10FFFF
TENSOR_DTYPES = {
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
}  # fmt: skip
"""The names of torch's dtypes, without the prefix ``torch.``."""
NUMPY_DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""NumPy dtypes for a tensor's bytes, by item size: NumPy lacks some of torch's dtypes."""


class LeftOut:
    """Stored in place of an example that a filter left out."""

    def __reduce__(self) -> str:
        return "LEFT_OUT"  # by name, so that worker processes get the same object


LEFT_OUT = LeftOut()


def _is_plain(text: str) -> bool:
    """True if a text, such as ``<f4``, names a plain dtype."""
    return _PLAIN_DTYPE.fullmatch(text) is not None


def _plain_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype that a text names. Raises ValueError or TypeError for other texts."""
    if not _is_plain(text):
        raise ValueError(f"not a plain dtype: {text!r}")
    return np.dtype(text)


def check_code_points(array: np.ndarray[Any, Any]) -> None:
    """Raise ValueError if a text has invalid code points, which Python cannot decode."""
    for name in array.dtype.names or ():
        check_code_points(array[name])
    if array.dtype.kind == "U" and array.size and array.itemsize:
        codes = np.ascontiguousarray(array).reshape(-1).view(array.dtype.byteorder + "u4")
        if codes.max() > _MAX_CODE_POINT:
            raise ValueError("a text has invalid code points")


def is_restorable(dtype: np.dtype[Any]) -> bool:
    """True if a dtype can be restored exactly."""
    if dtype.names is None:  # dtypes of other packages, such as bfloat16, have kind V too
        return _is_plain(dtype.str) and (dtype.kind != "V" or dtype.type is np.void)
    try:
        restored = parse_dtype(
            msgspec.msgpack.decode(msgspec.msgpack.encode(describe_dtype(dtype)))
        )
    except (TypeError, ValueError):
        return False
    return restored == dtype and restored.type is dtype.type


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)


def parse_dtype(description: Any) -> np.dtype[Any]:
    """Return a dtype of plain numbers, texts and bytes. Raises ValueError, TypeError."""
    if isinstance(description, str):
        return _plain_dtype(description)
    instance = np.lib.format.descr_to_dtype(_restore_tuples(description))
    if instance.hasobject:
        raise ValueError("the dtype holds Python objects")
    return instance


def _restore_tuples(description: Any) -> Any:
    """Return a dtype's description with tuples again: MessagePack turns tuples into lists."""
    if isinstance(description, str):
        return _plain_dtype(description).str
    return [
        tuple(
            tuple(part) if i and isinstance(part, list) and isinstance(part[0], int) else part
            for i, part in enumerate([*field[:1], _restore_tuples(field[1]), *field[2:]])
        )
        for field in description
    ]


def find_class(name: str, names: Sequence[str], *, is_tuple: bool) -> type | None:
    """Return a class with these fields if it is imported already, else None. Imports nothing."""
    module, _, path = name.partition(":")
    main = sys.modules["__main__"]
    # The writer may have imported as a module the file that runs here as the script.
    is_script = os.path.basename(getattr(main, "__file__", None) or "") == f"{module}.py"
    for place in [sys.modules.get(module)] + [main] * is_script:
        found: Any = place
        for part in path.split("."):
            # Not getattr(): a module's ``__getattr__`` or a property would run its code.
            found = getattr(found, "__dict__", {}).get(part)
        if not isinstance(found, type):
            continue
        own = _field_names(found, is_tuple=is_tuple)
        if own == list(names):
            return found
        if is_tuple and own and own == list(names[: len(own)]):  # with fields of ``with_index()``
            made: type = functools.reduce(longer, names[len(own) :], found)
            return made
    return None


def _field_names(kind: type, *, is_tuple: bool) -> list[str] | None:
    if is_tuple and issubclass(kind, tuple):
        return list(getattr(kind, "_fields", [None]))
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


@functools.lru_cache(maxsize=_MAX_MADE_CLASSES)
def make_namedtuple(name: str, names: tuple[str, ...]) -> Any:
    return namedtuple(name, names)  # raises ValueError for invalid names
