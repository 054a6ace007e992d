"""Blocks of shared memory that one process writes and others map.

A block is a memfd: it has no name and needs no room in ``/dev/shm``. The kernel frees it when the
last process that uses it is gone, even if that process was killed. The first page of a block holds
the *generation* of its contents: the number of the output that it belongs to, or 0 while the block
is free and may be written. Blocks are sealed: a receiver can neither write to one nor resize it.
Receivers map blocks privately, so no other process sees their writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Recycler
from stoker.basics.signals import finalize

# One page for the generation, so that the contents are aligned to a page, too.
_HEAD_BYTES = 4096
# The smallest page size of any system: a write every 4,096 bytes touches every page.
_PAGE_BYTES = 4096
_GENERATION = struct.Struct("<Q")
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# 0x10 is F_SEAL_FUTURE_WRITE, which Python's fcntl does not name.
_WRITE_SEALS = fcntl.F_SEAL_SEAL | 0x10
# Recyclers keep no smaller memory (basics/buffers.py), and each block costs a descriptor.
_MIN_SCRATCH_BYTES = 1 << 16
# Scratch sizes between two powers of two. So few sizes are recycled, and at most an eighth of a
# block is unused.
_SIZES_PER_DOUBLING = 8


class Block:
    """A block, in the process that writes it.

    Attributes:
        descriptor: the memfd.
        size: bytes after the first page.
        generation: the generation of its contents; 0 while it is free.
        users: how many payloads have buffers in it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.generation = 0
        self.users = 0
        self.descriptor = os.memfd_create("stoker-feed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, _HEAD_BYTES + size)
            self._head = mmap.mmap(self.descriptor, _HEAD_BYTES)
            # The mapping keeps the block alive. `Blocks.allocate` takes it out of this object:
            # otherwise the block would keep itself alive.
            self.contents: mmap.mmap | None = mmap.mmap(self.descriptor, _HEAD_BYTES + size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            with contextlib.suppress(OSError):  # kernels before 5.1 have no seal of future writing
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _WRITE_SEALS)
        except BaseException:
            os.close(self.descriptor)
            raise

    def mark(self, generation: int) -> None:
        """Set the generation."""
        self.generation = generation
        _GENERATION.pack_into(self._head, 0, generation)

    def close(self) -> None:
        """Close the descriptor; processes that have it mapped keep the memory."""
        os.close(self.descriptor)


class Blocks:
    """The blocks that a process has made. Safe to use from any thread, and from finalizers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in a thread that holds it
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._scratch = Recycler(allocate=self.allocate)

    def allocate(self, size: int) -> memoryview:
        """Return new shared memory; it is freed with its last reference."""
        block = Block(size)
        contents, block.contents = block.contents, None
        assert contents is not None
        # The finalizer is the array's, not the mapping's: an array's finalizer runs before its
        # memory is unmapped. Afterwards something else could lie at that address.
        owner = _Memory((size,), np.uint8, contents, _HEAD_BYTES)
        start = _address_of(owner)
        with self._lock:
            self._blocks[start] = block
            self._starts = sorted(self._blocks)
        # Not at exit: the kernel frees the memory then, and modules may be gone.
        finalize(owner, self._forget, start).atexit = False
        return owner.data

    def scratch(self, size: int) -> NDArray[np.uint8]:
        """Return at least ``size`` bytes of shared memory; earlier scratch memory is reused."""
        size = max(size, _MIN_SCRATCH_BYTES)
        step = 1 << max(0, size.bit_length() - _SIZES_PER_DOUBLING.bit_length())
        return self._scratch.array((-(-size // step) * step,), np.uint8)

    def find(self, array: NDArray[Any]) -> tuple[Block, int] | None:
        """Return an array's block and its offset there; None if it lies in no block."""
        low, high = np.lib.array_utils.byte_bounds(array)
        with self._lock:
            at = bisect_right(self._starts, low) - 1
            start = self._starts[at] if at >= 0 else 0
            block = self._blocks.get(start)
        if block is None or high > start + block.size:
            return None
        return block, _address_of(array) - start

    def clear(self) -> None:
        """Release all free memory."""
        self._scratch.clear()

    def held_bytes(self) -> int:
        """Return the size of all blocks."""
        with self._lock:
            return sum(block.size for block in self._blocks.values())

    def _forget(self, start: int) -> None:
        with self._lock:
            block = self._blocks.pop(start)
            self._starts = sorted(self._blocks)
        block.close()


class _Memory(np.ndarray[Any, Any]):
    """A subclass, so that views keep it as their base: NumPy skips plain arrays (see buffers)."""


def _address_of(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# The functions below run in the receiving processes.


class Stale(Exception):
    """A block no longer holds the contents that the message announced."""


def map_block(descriptor: int, generation: int) -> mmap.mmap:
    """Map a block privately, and close its descriptor.

    Raises Stale if it holds another generation by now; OSError or ValueError if it is not a block.
    """
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            # Reading a mapping behind the end of its file kills the process (SIGBUS).
            raise ValueError("the block is not sealed against shrinking")
        if os.fstat(descriptor).st_size <= _HEAD_BYTES:
            raise ValueError("the block has no contents")
        mapping = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    check_generation(mapping, generation)
    return mapping


def check_generation(mapping: mmap.mmap, generation: int) -> None:
    """Raise Stale unless the mapped block still holds this generation."""
    if _GENERATION.unpack_from(mapping)[0] != generation:
        raise Stale


def contents(mapping: mmap.mmap, start: int, size: int) -> memoryview:
    """Return ``size`` bytes of a mapped block's contents; fewer at its end."""
    return memoryview(mapping)[_HEAD_BYTES + start : _HEAD_BYTES + start + size]


def detach(mapping: mmap.mmap) -> None:
    """Make a mapping independent of its block: copy its pages into this process's memory."""
    pages = np.frombuffer(mapping, np.uint8)[_HEAD_BYTES::_PAGE_BYTES]
    np.bitwise_or(pages, 0, out=pages)
