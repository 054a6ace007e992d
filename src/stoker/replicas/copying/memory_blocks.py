"""Copies the memory of arrays and tensors by address: views of an array become views of its copy.

Small memory is copied. Of large memory, arrays get read-only views. A flag does not stop code that
writes through a tensor or a pointer. For such code, and for code that tried to write to a view
before, the kernel gives each copy pages of its own once they are written to.
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
"""Copied for each thread, in all, in 1 to 2 ms. Scratch buffers are seldom larger."""
_PRIVATE_BYTES = 1 << 30
"""Private once written to, in all: its content is held twice. Larger memory is data to be read."""
_FILE_BYTES = 256 << 20
"""Size of a file for private pages. Threads hold a descriptor of each file, so thousands of tensors
share one; an unfilled part takes no memory."""


class LargerBlock(Exception):
    """A block is part of a larger one, which must be copied first."""


class Original:
    """The memory of one or more originals, and a digest of its content."""

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

    def content_pages(self) -> tuple[_PagesFile, int]:
        """Return the file with the memory's content, and the offset."""
        global _filling
        if self._kept is None:
            file = _filling() if _filling is not None else None
            if file is None or file.left < self.size:
                file = _PagesFile(self.size)
                _filling = weakref.ref(file)
            self._kept = file, file.add(self.bytes)
        return self._kept


class _PagesFile:
    """A file in memory. Each reader that maps it gets its own copy of pages that it writes to.

    Attributes:
        left: the bytes that still fit.
    """

    def __init__(self, size: int) -> None:
        self._size = self.left = max(_FILE_BYTES, size + mmap.PAGESIZE)
        self._descriptor = os.memfd_create("stoker-private")
        weakref.finalize(self, os.close, self._descriptor)
        os.truncate(self._descriptor, self._size)

    def add(self, content: np.ndarray[Any, Any]) -> int:
        """Append content on pages of its own; return its offset."""
        start = place = self._size - self.left
        rest = content.data
        while rest:
            written = os.pwrite(self._descriptor, rest, place)
            rest, place = rest[written:], place + written
        self.left = max(0, self._size - -(-place // mmap.PAGESIZE) * mmap.PAGESIZE)
        return start

    def private(self) -> np.ndarray[Any, Any]:
        """Map the whole file, later additions included; the kernel copies pages on a write."""
        pages = mmap.mmap(self._descriptor, self._size, flags=mmap.MAP_PRIVATE)
        return np.frombuffer(pages, np.uint8)


_filling: weakref.ref[_PagesFile] | None = None

_mapped: weakref.WeakValueDictionary[tuple[int, int], Original] = weakref.WeakValueDictionary()

_written: set[tuple[int, int]] = set()
"""Start and size of memory that is written to. An entry does no harm once the memory is reused."""


class MemoryBlocks:
    """The memory of one copy, in place of the originals'.

    Args:
        extents: begin and end of memory that must be copied in one piece.

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
        """Return the block that holds the copy of some memory, and the offset of that memory in it.

        The block is None if the original's memory is shared.
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
        """Give later copies private pages in place of shared memory. False if none is shared.

        For code that writes to shared memory, or might do so where no flag prevents it.
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
        file, place = original.content_pages()
        pages = self._pages.get(file)
        if pages is None:
            pages = self._pages[file] = file.private()
        return pages[place : place + size]
