"""The dtypes that values of other processes and hosts may have: plain numbers, texts and bytes.

Elements of other dtypes are pointers, or have no bytes: data from a stranger could make them read
any memory, or never end.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_PLAIN = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9A-Za-z]{1,12}\])?")
# Of Unicode: NumPy's text may hold numbers above it, which no Python string can.
_LAST_LETTER = 0x10FFFF
TENSOR_DTYPES = {
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
}  # fmt: skip
"""The names of torch's dtypes."""


def is_plain(text: str) -> bool:
    """True if a text names a plain dtype."""
    return _PLAIN.fullmatch(text) is not None


def plain_dtype(text: str) -> np.dtype[Any]:
    """Return a dtype by its text. Raises ValueError or TypeError for other texts."""
    if not is_plain(text):
        raise ValueError(f"no dtype: {text!r}")
    return np.dtype(text)


def check_letters(array: np.ndarray[Any, Any]) -> None:
    """Refuse texts with invalid code points, which Python cannot decode.

    Raises ValueError.
    """
    for name in array.dtype.names or ():
        check_letters(array[name])
    if array.dtype.kind == "U" and array.size and array.itemsize:
        codes = np.ascontiguousarray(array).reshape(-1).view(array.dtype.byteorder + "u4")
        if codes.max() > _LAST_LETTER:
            raise ValueError("a text of letters that there are not")
