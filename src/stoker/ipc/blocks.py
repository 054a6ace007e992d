"""Shared memory that a feeder writes and jobs map: the kernel frees it with its last user.

A block is a memfd: it has no name, needs no room in ``/dev/shm``, and nothing is left of it when
the last process that has it open or mapped is gone, however that ended. Its first page holds the
*generation* of what is in it: the number of the hand-over that it belongs to, 0 while it belongs to
none and may be written. Blocks are sealed: who they are handed to can neither write nor resize
them.
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

from stoker.buffers import Recycler

HEAD_BYTES = 4096
GENERATION = struct.Struct("<Q")
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_LAST_SEALS = fcntl.F_SEAL_SEAL | 0x10  # the latter of future writing
_SMALLEST_BYTES = 1 << 16  # what a recycler takes for worth keeping
_STEPS = 8  # sizes of scratch memory between two powers of two


class Block:
    """A piece of shared memory, seen from the feeder.

    Attributes:
        descriptor: the memfd.
        size: bytes behind the head.
        generation: what the jobs are told that is in it, 0 for nothing.
        users: how many things that were handed over lie in it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.generation = 0
        self.users = 0
        self.descriptor = os.memfd_create("stoker-feed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, HEAD_BYTES + size)
            self._head = mmap.mmap(self.descriptor, HEAD_BYTES)
            # Whoever refers to this keeps the block; the block itself must not.
            self.contents: mmap.mmap | None = mmap.mmap(self.descriptor, HEAD_BYTES + size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            with contextlib.suppress(OSError):  # kernels before 5.1 have no seal of future writing
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _LAST_SEALS)
        except BaseException:
            os.close(self.descriptor)
            raise

    def mark(self, generation: int) -> None:
        """Say what is in it from now on."""
        self.generation = generation
        GENERATION.pack_into(self._head, 0, generation)

    def close(self) -> None:
        """Let go of it; jobs that have it mapped keep it."""
        os.close(self.descriptor)


class Blocks:
    """All the shared memory of a feeder. Safe to use from any thread, and from finalisers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may come in between
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._scratch = Recycler(allocate=self.allocate)

    def allocate(self, size: int) -> memoryview:
        """Return new shared memory; it is freed once nobody refers to it."""
        block = Block(size)
        contents, block.contents = block.contents, None
        assert contents is not None
        # The end of an array is told before its memory is unmapped, that of a mapping after it,
        # when something else may lie there.
        owner = _Memory((size,), np.uint8, contents, HEAD_BYTES)
        start = _address(owner)
        with self._lock:
            self._blocks[start] = block
            self._starts = sorted(self._blocks)
        weakref.finalize(owner, self._gone, start).atexit = False
        return owner.data

    def scratch(self, size: int) -> NDArray[np.uint8]:
        """Return at least ``size`` bytes of shared memory, recycled."""
        size = max(size, _SMALLEST_BYTES)
        step = 1 << max(0, size.bit_length() - _STEPS.bit_length())
        return self._scratch.array((-(-size // step) * step,), np.uint8)

    def find(self, array: NDArray[Any]) -> tuple[Block, int] | None:
        """Return the block that an array lies in, and where its first element is; None if none."""
        low, high = np.lib.array_utils.byte_bounds(array)
        with self._lock:
            at = bisect_right(self._starts, low) - 1
            block = self._blocks.get(self._starts[at]) if at >= 0 else None
            start = self._starts[at] if at >= 0 else 0
        if block is None or high > start + block.size:
            return None
        return block, _address(array) - start

    def clear(self) -> None:
        """Keep no free memory any more."""
        self._scratch.clear()

    def held_bytes(self) -> int:
        """Return the size of all blocks."""
        with self._lock:
            return sum(block.size for block in self._blocks.values())

    def _gone(self, start: int) -> None:
        with self._lock:
            block = self._blocks.pop(start)
            self._starts = sorted(self._blocks)
        block.close()


class _Memory(np.ndarray[Any, Any]):
    """Of a type of its own, so that NumPy does not take it for the base of views (see buffers)."""


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
