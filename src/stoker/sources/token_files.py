"""Files of tokens: what is in them, and where the tokens begin."""

from __future__ import annotations

import os
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from stoker.signals import pass_on
from stoker.sources.open_files import FileVersion, version_of


class TokenFile(NamedTuple):
    """A file of tokens, as it was found."""

    path: str
    version: FileVersion
    dtype: np.dtype[Any]
    start: int
    """Where the tokens begin, in bytes."""
    tokens: int


def find_tokens(path: str, dtype: DTypeLike | None) -> TokenFile:
    found = os.stat(path)
    with open(path, "rb") as file:
        return token_file(path, version_of(found), dtype, file)


def token_file(
    path: str, version: FileVersion, dtype: DTypeLike | None, file: BinaryIO
) -> TokenFile:
    """Find out what the tokens of a file are, and how many, from its beginning."""
    start = 0
    if path.endswith(".npy"):
        shape, kind = _npy_header(path, file)
        if len(shape) != 1:
            raise ValueError(f"{path} is no row of tokens: its shape is {list(shape)}")
        start = file.tell()
        if dtype is not None and np.dtype(dtype) != kind:
            raise ValueError(f"{path} holds {kind}, not {np.dtype(dtype)}: leave dtype out")
        if version.size_bytes < start + shape[0] * kind.itemsize:
            raise ValueError(
                f"{path} is no array of tokens: it is truncated, with {version.size_bytes:,} "
                f"bytes for {shape[0]:,} tokens"
            )
    elif dtype is None:
        raise TypeError(f"what are the tokens in {path}? Say so, such as dtype='uint16'")
    else:
        kind = np.dtype(dtype)
    if kind.kind not in "iu" or not np.can_cast(kind, np.int64):
        raise TypeError(f"tokens are integers that fit into int64; those in {path} are {kind}")
    nbytes = version.size_bytes - start
    if nbytes % kind.itemsize:
        raise ValueError(
            f"{path} is truncated, or of another dtype: its {nbytes:,} bytes are no whole number "
            f"of {kind} tokens"
        )
    return TokenFile(path, version, kind, start, nbytes // kind.itemsize)


def _npy_header(path: str, file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    form = np.lib.format
    try:
        first = form.read_magic(file) == (1, 0)
        read = form.read_array_header_1_0 if first else form.read_array_header_2_0
        shape, _, kind = read(file)
    except Exception as error:  # NumPy parses the header as Python: anything may be wrong with it
        pass_on(error)
        raise ValueError(f"{path} is no array of tokens: {error}") from error
    if any(length < 0 for length in shape):
        raise ValueError(f"{path} is no array of tokens: its shape is {list(shape)}")
    return shape, kind
