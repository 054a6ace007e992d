"""Documents of token files, by number: ``from_tokens`` without a length.

A separator tells where documents end, which one pass over the files finds; or Megatron's ``.idx``
file beside each ``.bin``, which alone is read then. A document takes 12 bytes of memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.basics.validate import is_whole_number
from stoker.schedule.numbering import Numbering
from stoker.sources.files import OpenFiles, PartialFile
from stoker.sources.in_files import FileItem, RangedFiles
from stoker.sources.patterns import Paths
from stoker.sources.remote.reader import RemoteFile
from stoker.sources.remote.storage import RemoteOptions
from stoker.sources.source import Indices
from stoker.sources.tokens import MEGATRON, TokenFile, token_file

_SCAN_BYTES = 1 << 20  # at URLs a request. Chosen, not measured.
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

Bounds = NDArray[np.int64]
"""Where the documents of a file begin, and where the last one ends, in tokens."""


class DocumentSource(RangedFiles):
    """The documents of token files, ``int64 [tokens]`` each, with the separator that ends them.

    Documents of a single token, as of a separator alone, are left out.
    """

    caller = "from_tokens"
    fields = ()
    _files: Sequence[TokenFile]

    def __init__(
        self,
        paths: Paths,
        options: RemoteOptions,
        dtype: DTypeLike | None = None,
        separator: int | None = None,
    ) -> None:
        if separator is not None and not is_whole_number(separator):
            raise TypeError(f"separator is a token, a whole number, not {separator!r}")

        def look(file: PartialFile) -> tuple[TokenFile, Bounds] | _Index:
            if file.path.endswith(".idx") and separator is None:
                return _read_index(file)
            found = token_file(file, dtype)
            return found, _split(file, found, separator)

        found = self.look(paths, options, look)
        each = [one for one in found if not isinstance(one, _Index)]
        indices = {one.path: one for one in found if isinstance(one, _Index)}
        if indices:  # alone: what says where documents end in other files is refused beside them
            given = self.given
            each = self.look(list(indices), options, lambda bin: _of_index(indices[bin.path], bin))
            self.given = given
        self._files = [file for file, _ in each]
        sizes = np.concatenate([np.diff(bounds) for _, bounds in each])
        begins = np.concatenate([bounds[:-1] for _, bounds in each])
        kept = sizes > 1
        if not kept.any():
            raise ValueError(f"{self.name} has no documents")
        files = np.repeat(np.arange(len(each)), [len(bounds) - 1 for _, bounds in each])
        self._numbering = Numbering(np.bincount(files[kept], minlength=len(each)))
        self._begins, self._sizes = begins[kept], sizes[kept]
        if self._sizes.max() <= np.iinfo(np.int32).max:
            self._sizes = self._sizes.astype(np.int32)
        self._digest = f"{zlib.crc32(self._sizes.data):08x}"
        self._opened = OpenFiles()

    def __len__(self) -> int:
        return len(self._sizes)

    def lengths(self) -> NDArray[Any]:
        return self._sizes

    def fetch(self, indices: Indices) -> list[Any]:
        if self.access is not None:
            return super().fetch(indices)
        found = []
        for index in map(int, indices):
            file, part = self._file_of(index), self.locate(index)
            assert part.start is not None
            data = self._opened.read(file.path, file.version, part.start, part.size)
            found.append(self.example(index, data))
        return found

    def locate(self, index: int) -> RemoteFile:
        file = self._file_of(index)
        each = file.dtype.itemsize
        start, nbytes = file.start + int(self._begins[index]) * each, int(self._sizes[index]) * each
        return RemoteFile(file.path, nbytes, start, *file.version[:2])

    def example(self, index: int, data: bytes) -> Any:
        return np.frombuffer(data, self._file_of(index).dtype).astype(np.int64)

    def item(self, index: int) -> FileItem:
        token = int(self._begins[index])
        return FileItem(self._file_of(index), token, f" from token {token} on")

    def extent(self) -> str:
        return f"{len(self):,} documents of {self._sizes.sum():,} tokens"

    def signature(self) -> str:
        return f"{len(self)} documents of tokens, sizes {self._digest}"

    def settings(self) -> str:
        return f"documents {sorted({file.dtype.str for file in self._files})} {self._digest}"

    def _file_of(self, index: int) -> TokenFile:
        return self._files[self._numbering.find(index)[0]]


class _Index(NamedTuple):
    """What an ``.idx`` file says of the ``.bin`` file with this path."""

    path: str
    dtype: str
    bounds: Bounds


def _split(file: PartialFile, found: TokenFile, separator: int | None) -> Bounds:
    """Find the documents of a file by the token that ends them."""
    if separator is None:
        raise ValueError(
            f"from_tokens: where do the documents in {file.path} end? Give separator=, the token "
            "that ends each, or Megatron's .idx files; for windows give their length"
        )
    each, bounds = found.dtype.itemsize, [np.zeros(1, np.int64)]
    step = _SCAN_BYTES // each
    for first in range(0, found.tokens, step):
        nbytes = min(step, found.tokens - first) * each
        part = np.frombuffer(file.read(found.start + first * each, nbytes), found.dtype)
        bounds.append(np.flatnonzero(part == separator) + (first + 1))
    if not any(map(len, bounds[1:])):
        raise ValueError(f"from_tokens: {file.path} has no token {separator}, the separator")
    return np.append(np.concatenate(bounds), found.tokens)


def _read_index(file: PartialFile) -> _Index:
    """Read Megatron's index: header, sequences' lengths and offsets, documents' first sequences."""
    magic, version, code, sequences, count = _HEAD.unpack(file.read(0, _HEAD.size))
    if magic != MEGATRON or version != 1 or code not in _DTYPES:
        raise ValueError(f"{file.path} is no index of token files as Megatron writes it")
    behind = _HEAD.size + 12 * sequences  # int32 and int64 for each
    if file.version.size_bytes < behind + 8 * count:
        raise ValueError(f"{file.path} is truncated")
    lengths = np.frombuffer(file.read(_HEAD.size, 4 * sequences), "<i4")
    ends = np.append(np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64))
    firsts = np.frombuffer(file.read(behind, 8 * count), "<i8").clip(0, sequences)
    return _Index(file.path.removesuffix("idx") + "bin", _DTYPES[code], ends[firsts])


def _of_index(index: _Index, file: PartialFile) -> tuple[TokenFile, Bounds]:
    found, bounds = token_file(file, index.dtype), index.bounds
    if bounds.max(initial=0) > found.tokens or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{file.path} does not fit its .idx file: it has {found.tokens:,} tokens")
    return found, bounds
