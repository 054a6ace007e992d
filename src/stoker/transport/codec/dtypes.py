"""Dtypes that are safe to accept from other processes and hosts: numbers, texts, bytes, times.

Other dtypes are refused: their elements are pointers, or have no bytes. A sender could then make
this process read any memory, or allocate without end.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

_PLAIN = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9A-Za-z]{1,12}\])?")
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


def is_plain(text: str) -> bool:
    """True if a text, such as ``<f4``, names a plain dtype."""
    return _PLAIN.fullmatch(text) is not None


def plain_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype that a text names. Raises ValueError or TypeError for other texts."""
    if not is_plain(text):
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
        return is_plain(dtype.str) and (dtype.kind != "V" or dtype.type is np.void)
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
        return plain_dtype(description)
    instance = np.lib.format.descr_to_dtype(_restore_tuples(description))
    if instance.hasobject:
        raise ValueError("the dtype holds Python objects")
    return instance


def _restore_tuples(description: Any) -> Any:
    """Return a dtype's description with tuples again: MessagePack turns tuples into lists."""
    if isinstance(description, str):
        return plain_dtype(description).str
    return [
        tuple(
            tuple(part) if i and isinstance(part, list) and isinstance(part[0], int) else part
            for i, part in enumerate([*field[:1], _restore_tuples(field[1]), *field[2:]])
        )
        for field in description
    ]
