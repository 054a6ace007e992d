"""Copies of the memory of arrays and tensors, by address: views of an array are views of its copy.

Small memory is copied. Large memory is not: arrays get views of it that cannot be written to, and
where that is not enough (what writes through a tensor or a pointer sees no flag; code wrote to such
a view before) the kernel gives each copy pages of its own once they are written to.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

_COPIED_BYTES = 8 << 20
"""What is copied for each thread in all, in 1 to 2 ms; scratch buffers are seldom larger."""
_PRIVATE_BYTES = 1 << 30
"""What is private once written to, in all: it is held twice. More than that is data to be read."""
_FILE_BYTES = 256 << 20
"""Of one file for private pages. Threads hold a descriptor of each, and thousands of tensors share
one; what is not filled takes no memory."""


class LargerBlock(Exception):
    """A block turned out to be a part of a larger one, which must be copied first."""


class Original:
    """The memory of one or more originals, and what it held."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        memory: Any = (ctypes.c_char * size).from_address(start)
        self.bytes: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8)
        self.digest = self._digest()
        self._kept: tuple[_PagesFile, int] | None = None

    def _digest(self) -> bytes:
        import xxhash

        return xxhash.xxh3_128_digest(self.bytes.data)

    def is_current(self) -> bool:
        return self._digest() == self.digest

    def kept(self) -> tuple[_PagesFile, int]:
        """Return the file that holds the memory's content, and where."""
        global _filling
        if self._kept is None:
            file = _filling() if _filling is not None else None
            if file is None or file.left < self.size:
                file = _PagesFile(self.size)
                _filling = weakref.ref(file)
            self._kept = file, file.add(self.bytes)
        return self._kept


class _PagesFile:
    """A file in memory, whose pages are each reader's own once written to.

    Attributes:
        left: how many bytes there is room for.
    """

    def __init__(self, size: int) -> None:
        self._size = self.left = max(_FILE_BYTES, size + mmap.PAGESIZE)
        self._descriptor = os.memfd_create("stoker-private")
        weakref.finalize(self, os.close, self._descriptor)
        os.truncate(self._descriptor, self._size)

    def add(self, content: np.ndarray[Any, Any]) -> int:
        """Write to the file, and return where: on pages that hold nothing else."""
        start = place = self._size - self.left
        rest = content.data
        while rest:
            written = os.pwrite(self._descriptor, rest, place)
            rest, place = rest[written:], place + written
        self.left = max(0, self._size - -(-place // mmap.PAGESIZE) * mmap.PAGESIZE)
        return start

    def private(self) -> np.ndarray[Any, Any]:
        """Return all that was and will be added; pages that are written are copied."""
        pages = mmap.mmap(self._descriptor, self._size, flags=mmap.MAP_PRIVATE)
        return np.frombuffer(pages, np.uint8)


_filling: weakref.ref[_PagesFile] | None = None

_mapped: weakref.WeakValueDictionary[tuple[int, int], Original] = weakref.WeakValueDictionary()

_written: set[tuple[int, int]] = set()
"""Start and size of memory that is written to. No harm is done where another lies there later."""


class MemoryBlocks:
    """The memory that one copy has in place of the originals'.

    Args:
        extents: where memory begins and ends that must be copied in one piece.

    Attributes:
        originals: the memory that was copied, or is private once written to.
    """

    def __init__(self, extents: Sequence[tuple[int, int]]) -> None:
        self.originals: list[Original] = []
        self._extents = list(extents)
        self._shared: list[tuple[int, int]] = []
        self._left, self._left_private = _COPIED_BYTES, _PRIVATE_BYTES
        self._pages: dict[_PagesFile, np.ndarray[Any, Any]] = {}
        self._begins: list[int] = []  # of blocks, which are apart from each other; sorted
        self._blocks: dict[int, tuple[int, np.ndarray[Any, Any] | None]] = {}

    def block_for(self, start: int, size: int) -> tuple[np.ndarray[Any, Any] | None, int]:
        """Return the bytes that stand for a block, and where in them this memory begins.

        None for bytes means that the original's are shared.
        """
        for begin, end in self._extents:
            if begin <= start and start + size <= end:
                start_of, size_of = begin, end - begin
                break
        else:
            start_of, size_of = start, size
        at = bisect.bisect_left(self._begins, start_of + size_of)
        if at:
            begin = self._begins[at - 1]
            end, block = self._blocks[begin]
            if begin <= start and start + size <= end:
                return block, start - begin
            if start_of < end:
                raise LargerBlock(min(begin, start_of), max(end, start_of + size_of))
        block = self._new(start_of, size_of)
        self._begins.insert(at, start_of)
        self._blocks[start_of] = start_of + size_of, block
        return block, start - start_of

    def make_private(self) -> bool:
        """Have the next copies of large memory be private. False if none is shared that could be.

        For code that writes to what is shared, or may do so where no flag prevents it.
        """
        _written.update(self._shared)
        return bool(self._shared)

    def _new(self, start: int, size: int) -> np.ndarray[Any, Any] | None:
        if size <= self._left:
            self._left -= size
            original = Original(start, size)
            self.originals.append(original)
            return np.array(original.bytes)
        if (start, size) not in _written:
            self._shared.append((start, size))
            return None
        if size > self._left_private:
            return None
        original = _mapped.get((start, size)) or Original(start, size)
        if not original.is_current():
            original = Original(start, size)
        _mapped[start, size] = original
        self.originals.append(original)
        self._left_private -= size
        file, place = original.kept()
        pages = self._pages.get(file)
        if pages is None:
            pages = self._pages[file] = file.private()
        return pages[place : place + size]
