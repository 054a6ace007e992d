"""Blocks of shared memory that one process writes and others map.

A block is a memfd: it has no name, needs no room in ``/dev/shm``, and the kernel frees it when the
last process that has it open or mapped is gone, however that ended. Its first page holds the
*generation* of its contents: the number of the hand-over that it belongs to, 0 while it belongs to
none and may be written. Blocks are sealed: a receiver can neither write to one nor resize it. A
receiver maps it privately: no other process sees its writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import weakref
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Recycler

# One page for the generation, so that the contents begin on a page, too.
_HEAD_BYTES = 4096
# The smallest page there is: one byte written in each makes all of them this process's own.
_PAGE_BYTES = 4096
_GENERATION = struct.Struct("<Q")
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# 0x10 is F_SEAL_FUTURE_WRITE, which Python's fcntl does not name.
_LAST_SEALS = fcntl.F_SEAL_SEAL | 0x10
# A recycler keeps nothing smaller (basics/buffers.py), and each block has a descriptor.
_SMALLEST_BYTES = 1 << 16
# Sizes of scratch memory between two powers of two: at most an eighth of a block is left over, and
# few sizes are recycled.
_STEPS = 8


class Block:
    """A block, in the process that writes it.

    Attributes:
        descriptor: the memfd.
        size: bytes after the head.
        generation: its contents' generation, 0 for none.
        users: how many handed-over values it holds.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.generation = 0
        self.users = 0
        self.descriptor = os.memfd_create("stoker-feed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, _HEAD_BYTES + size)
            self._head = mmap.mmap(self.descriptor, _HEAD_BYTES)
            # Whoever refers to this keeps the block; the block itself must not.
            self.contents: mmap.mmap | None = mmap.mmap(self.descriptor, _HEAD_BYTES + size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            with contextlib.suppress(OSError):  # kernels before 5.1 have no seal of future writing
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _LAST_SEALS)
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
    """All blocks of a process. Safe to use from any thread, and from finalizers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may come in between
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._scratch = Recycler(allocate=self.allocate)

    def allocate(self, size: int) -> memoryview:
        """Return new shared memory; it is freed with its last reference."""
        block = Block(size)
        contents, block.contents = block.contents, None
        assert contents is not None
        # An array's finaliser runs before its memory is unmapped, that of a mapping after it, when
        # something else may lie at the address.
        owner = _Memory((size,), np.uint8, contents, _HEAD_BYTES)
        start = _address_of(owner)
        with self._lock:
            self._blocks[start] = block
            self._starts = sorted(self._blocks)
        # At exit the kernel frees all of it, and what this would call may be gone.
        weakref.finalize(owner, self._forget, start).atexit = False
        return owner.data

    def scratch(self, size: int) -> NDArray[np.uint8]:
        """Return at least ``size`` bytes of shared memory, recycled."""
        size = max(size, _SMALLEST_BYTES)
        step = 1 << max(0, size.bit_length() - _STEPS.bit_length())
        return self._scratch.array((-(-size // step) * step,), np.uint8)

    def find(self, array: NDArray[Any]) -> tuple[Block, int] | None:
        """Return an array's block and the offset of its first element; None if it is in no
        block."""
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
    """A separate type, so that NumPy does not take it for the base of views (see buffers)."""


def _address_of(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# What follows runs in the processes that blocks are handed to.


class Stale(Exception):
    """A block no longer holds the announced contents."""


def map_block(descriptor: int, generation: int) -> mmap.mmap:
    """Map a block privately, and close its descriptor.

    Raises Stale when it holds another generation now; OSError or ValueError when it is not a block.
    """
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("a block that may shrink would end who reads it")
        if os.fstat(descriptor).st_size <= _HEAD_BYTES:
            raise ValueError("a block has contents behind its head")
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
    """Return a part of a mapped block's contents; less at its end."""
    return memoryview(mapping)[_HEAD_BYTES + start : _HEAD_BYTES + start + size]


def detach(mapping: mmap.mmap) -> None:
    """Make a mapping independent of its block: copy its pages into this process's memory."""
    pages = np.frombuffer(mapping, np.uint8)[_HEAD_BYTES::_PAGE_BYTES]
    np.bitwise_or(pages, 0, out=pages)
