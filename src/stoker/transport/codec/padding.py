"""The bytes between the numbers of an array: they may hold old memory of this process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# An x87 long double has 63 bits of mantissa: 10 bytes of data, padded to 12 or 16.
_LONGDOUBLE_IS_PADDED = np.finfo(np.longdouble).nmant == 63
# Sign and exponent take two bytes of an x87 long double, the mantissa eight.
_LONGDOUBLE_BYTES = 10


def without_padding(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array with zeroed padding: padding may hold old memory of this process."""
    if not _has_padding(array.dtype):
        return array
    clean = np.zeros(array.shape, array.dtype)
    _copy_without_padding(clean, array)
    return clean


def _has_padding(dtype: np.dtype[Any]) -> bool:
    if dtype.subdtype is not None:
        return _has_padding(dtype.subdtype[0])
    if dtype.names is None:
        return _LONGDOUBLE_IS_PADDED and dtype.char in "gG"
    fields = [dtype[name] for name in dtype.names]
    return sum(f.itemsize for f in fields) < dtype.itemsize or any(map(_has_padding, fields))


def _copy_without_padding(out: NDArray[Any], array: NDArray[Any]) -> None:
    """Copy an array's numbers, but not the padding between them."""
    for name in array.dtype.names or ():
        _copy_without_padding(out[name], array[name])
    if array.dtype.names is None:
        if _has_padding(array.dtype):
            array = array.copy()
            size = np.dtype(np.longdouble).itemsize
            parts = array.reshape(-1).view(np.uint8).reshape(-1, size)
            parts[
                :,
                slice(_LONGDOUBLE_BYTES, size)
                if array.dtype.isnative
                else slice(size - _LONGDOUBLE_BYTES),
            ] = 0
        out[...] = array
