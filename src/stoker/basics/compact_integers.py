"""Integers as short text, for states: small gaps and counts take a fraction of a byte each.

Who reads says what there may be at most, so that no text takes more memory than what it stands for.
Reading raises TypeError or ValueError for what nobody wrote.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 1 << 53
"""No count is larger: up to here JSON's numbers are exact in every reader, and floats too."""
# The largest byte marks a larger number; most gaps between kept items are small.
_FAR = 255


def whole(number: Any, least: int = 0, most: int | None = LARGEST) -> int:
    """Return what must be a whole number within bounds; above there may be none."""
    if type(number) is not int:
        raise TypeError(f"{shown(number)} is no whole number")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{shown(number)} is not between {least:,} and {most or 0:,}")
    return number


def shown(what: Any) -> str:
    """Return something that may be anything in a few letters, for messages."""
    text = repr(what)
    return text if len(text) <= 80 else f"{text[:77]}..."


def packed(ascending: NDArray[np.int64], first: int) -> str:
    """Write ascending integers, none below ``first``, by the gaps between them."""
    return packed_small(np.diff(ascending, prepend=first - 1) - 1)


def unpacked(text: Any, first: int, most: int, stop: int) -> NDArray[np.int64]:
    """Read what ``packed`` wrote: at most ``most`` integers, all below ``stop``."""
    numbers = np.cumsum(unpacked_small(text, most, stop - first) + 1) + first - 1
    # No sum of two gaps overflows, so the first one that is too large shows.
    if len(numbers) and not first <= int(numbers.min()) <= int(numbers.max()) < stop:
        raise ValueError(f"there are numbers beyond {stop:,}")
    return numbers


def packed_small(values: NDArray[np.int64]) -> str:
    """Write integers from 0, most of them small."""
    near = np.minimum(values, _FAR).astype(np.uint8)
    return f"{packed_bytes(near)}:{packed_bytes(values[values >= _FAR].astype('<u8'))}"


def unpacked_small(text: Any, most: int, stop: int) -> NDArray[np.int64]:
    """Read what ``packed_small`` wrote: at most ``most`` integers, all below ``stop``."""
    near, far = _text(text).split(":")
    values = unpacked_bytes(near, most).astype(np.int64)
    large = values == _FAR
    values[large] = unpacked_bytes(far, 8 * int(large.sum())).view("<u8").astype(np.int64)
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < min(stop, LARGEST):
        raise ValueError(f"there are numbers beyond {stop:,}")
    return values


def packed_bytes(values: NDArray[np.generic]) -> str:
    """Write the bytes of an array."""
    return base64.b85encode(zlib.compress(values.tobytes(), 9)).decode()


def unpacked_bytes(text: Any, most: int) -> NDArray[np.uint8]:
    """Read what ``packed_bytes`` wrote, ``uint8 [n]``, n at most ``most``."""
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(base64.b85decode(_text(text)), most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(content) > most:
        raise ValueError(f"more than {most:,} bytes are packed")
    if not inflate.eof or inflate.unused_data:
        raise ValueError("what is packed is cut short, or too long")
    return np.frombuffer(content, np.uint8)


def _text(text: Any) -> str:
    if type(text) is not str:
        raise TypeError(f"{shown(text)} is no packed text")
    return text
