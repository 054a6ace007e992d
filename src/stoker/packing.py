"""Integers as short text, for states: small gaps and counts take a fraction of a byte each."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

_FAR = 255


def packed(ascending: NDArray[np.int64], first: int) -> str:
    """Write ascending integers, none below ``first``, by the gaps between them."""
    return packed_small(np.diff(ascending, prepend=first - 1) - 1)


def unpacked(text: str, first: int) -> NDArray[np.int64]:
    """Read what ``packed`` wrote. Raises ValueError or zlib.error when it is damaged."""
    return np.cumsum(unpacked_small(text) + 1) + first - 1


def packed_small(values: NDArray[np.int64]) -> str:
    """Write integers from 0, most of them small."""
    near = np.minimum(values, _FAR).astype(np.uint8)
    return f"{packed_bytes(near)}:{packed_bytes(values[values >= _FAR].astype('<u8'))}"


def unpacked_small(text: str) -> NDArray[np.int64]:
    """Read what ``packed_small`` wrote. Raises ValueError or zlib.error when it is damaged."""
    near, far = text.split(":")
    values = unpacked_bytes(near).astype(np.int64)
    values[values == _FAR] = unpacked_bytes(far).view("<u8").astype(np.int64)
    return values


def packed_bytes(values: NDArray[np.generic]) -> str:
    """Write the bytes of an array."""
    return base64.b85encode(zlib.compress(values.tobytes(), 9)).decode()


def unpacked_bytes(text: str) -> NDArray[np.uint8]:
    """Read what ``packed_bytes`` wrote, ``uint8 [n]``."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
