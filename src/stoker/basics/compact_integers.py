"""Encodes integers as short text, for states: small gaps and counts take less than a byte each.

A reader gives upper bounds, so a crafted text cannot take more memory than a valid one. Reading
raises TypeError or ValueError for invalid texts.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 1 << 53
"""The largest count: up to here numbers in JSON are exact for every reader, as are floats."""
# A byte of 255 marks a number that is stored elsewhere; most gaps between items are smaller.
_FAR = 255


def check_integer(number: Any, least: int = 0, most: int | None = LARGEST) -> int:
    """Return ``number`` if it is a whole number within bounds. Raises TypeError or ValueError."""
    if type(number) is not int:
        raise TypeError(f"{short_repr(number)} is not a whole number")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{short_repr(number)} is not between {least:,} and {most or 0:,}")
    return number


def short_repr(what: Any) -> str:
    text = repr(what)
    return text if len(text) <= 80 else f"{text[:77]}..."


def encode_ascending(ascending: NDArray[np.int64], first: int) -> str:
    """Encode ascending integers, none below ``first``, by the gaps between them."""
    return encode_small(np.diff(ascending, prepend=first - 1) - 1)


def decode_ascending(text: Any, first: int, most: int, stop: int) -> NDArray[np.int64]:
    """Decode the text of ``encode_ascending``: at most ``most`` integers, all below ``stop``."""
    numbers = np.cumsum(decode_small(text, most, stop - first) + 1) + first - 1
    # Gaps are below 2^53, so the sum passes ``stop`` before it can overflow.
    if len(numbers) and not first <= int(numbers.min()) <= int(numbers.max()) < stop:
        raise ValueError(f"the text holds numbers beyond {stop:,}")
    return numbers


def encode_small(values: NDArray[np.int64]) -> str:
    """Encode integers from 0, most of which are small."""
    near = np.minimum(values, _FAR).astype(np.uint8)
    return f"{encode_bytes(near)}:{encode_bytes(values[values >= _FAR].astype('<u8'))}"


def decode_small(text: Any, most: int, stop: int) -> NDArray[np.int64]:
    """Decode the text of ``encode_small``: at most ``most`` integers, all below ``stop``."""
    near, far = _text(text).split(":")
    values = decode_bytes(near, most).astype(np.int64)
    large = values == _FAR
    values[large] = decode_bytes(far, 8 * int(large.sum())).view("<u8").astype(np.int64)
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < min(stop, LARGEST):
        raise ValueError(f"the text holds numbers beyond {stop:,}")
    return values


def encode_bytes(values: NDArray[np.generic]) -> str:
    return base64.b85encode(zlib.compress(values.tobytes(), 9)).decode()


def decode_bytes(text: Any, most: int) -> NDArray[np.uint8]:
    """Decode the text of ``encode_bytes`` as ``uint8 [n]``, with n at most ``most``."""
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(base64.b85decode(_text(text)), most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(content) > most:
        raise ValueError(f"the text holds more than {most:,} bytes")
    if not inflate.eof or inflate.unused_data:
        raise ValueError("the text is cut short, or too long")
    return np.frombuffer(content, np.uint8)


def _text(text: Any) -> str:
    if type(text) is not str:
        raise TypeError(f"{short_repr(text)} is not a text")
    return text
