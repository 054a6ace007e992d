"""Values that other processes read in place, in blocks of shared memory.

A block is a memfd: it has no name and needs no room in ``/dev/shm``. The kernel frees it when the
last process that uses it is gone, even if that process was killed. The first page of a block holds
the *generation* of its contents: the number of the output that it belongs to, or 0 while the block
is free and may be written. Blocks are sealed: a receiver can neither write to one nor resize it.
Receivers map blocks privately, so no other process sees their writes.

A payload is a value in blocks: a pickle, and the place of each buffer.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import struct
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.signals import finalize
from stoker.transport.flatten import Flattener, address_of, aligned_offsets

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
Place = tuple[int, int, int]
"""Where a buffer lies: the number of its block, its offset in the block and its size in bytes."""
# Headers up to this size travel in the message itself: copying two pages is cheaper than mapping a
# block. Chosen, not measured.
_INLINE_BYTES = 8192
# Buffers up to this size are part of the header: a page is the unit in which memory is shared.
_SMALL_BYTES = 4096
# The kernel passes at most 253 descriptors in one message, and other parts of it need some.
_MAX_BLOCKS = 100
# Further buffers become part of the header, so that a receiver can bound its reads. Chosen, not
# measured.
_MAX_PLACES = 1000


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
        start = address_of(owner)
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
        return block, address_of(array) - start

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


@dataclass
class Payload:
    """A value in blocks of shared memory, ready to send; it keeps the blocks alive.

    Attributes:
        owners: the objects that keep the blocks alive: the value, and scratch memory.
        header: the pickle; empty if it is long, and then stored in the last place.
        places: where each buffer lies.
        blocks: the blocks that hold the buffers.
        nbytes: shared memory that the buffers take.
    """

    owners: list[Any]
    header: bytes
    places: list[Place]
    blocks: list[Block]
    nbytes: int

    def mark(self, generation: int) -> None:
        """Give the blocks this generation, unless another payload still uses them."""
        for block in self.blocks:
            if not block.users:
                block.mark(generation)
            block.users += 1

    def retire(self) -> None:
        """Release the blocks: no job maps them any more, so they may be written again."""
        for block in self.blocks:
            block.users -= 1
            if not block.users:
                block.mark(0)
        self.owners = []
        self.blocks = []


def to_payload(value: Any, blocks: Blocks) -> Payload:
    """Return a value as a payload.

    Arrays that lie in ``blocks`` are not copied, and must not be written any more. Others are
    copied into scratch blocks. The receiver gets arrays read-only, and tensors writable.

    Raises TypeError for a value that cannot be pickled.
    """
    flattener = _BlockFlattener(blocks)
    try:
        header = flattener.flatten(value)
    except Exception as error:
        raise TypeError(f"a feed cannot send this value to its jobs: {error}") from error
    if len(header) > _INLINE_BYTES:
        flattener.buffers.append(memoryview(header))
        flattener.places.append(None)
        header = b""
    sizes = [buffer.nbytes for buffer in flattener.buffers]
    unplaced = [n for n, place in enumerate(flattener.places) if place is None]
    places = [place or (0, 0, 0) for place in flattener.places]
    owners = [value]
    if unplaced:
        *starts, end = aligned_offsets([sizes[n] for n in unplaced])
        scratch = blocks.scratch(end)
        owners.append(scratch)
        found = blocks.find(scratch)
        assert found is not None
        for n, start in zip(unplaced, starts, strict=True):
            scratch.data[start : start + sizes[n]] = flattener.buffers[n]
            places[n] = len(flattener.used), found[1] + start, sizes[n]
        flattener.used.append(found[0])
    return Payload(owners, header, places, flattener.used, sum(sizes))


class _BlockFlattener(Flattener):
    """Pickles a value, and finds the blocks in which its buffers lie.

    Attributes:
        used: the blocks that hold buffers of the value.
        places: each buffer's place; None for a buffer outside all blocks.
    """

    read_only = True

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks = blocks
        self.used: list[Block] = []
        self.places: list[Place | None] = []

    def reduce(self, value: Any) -> Any:
        if pytree.is_tensor(value) and value.device.type != "cpu":
            raise TypeError(
                f"it holds a tensor on {value.device}. Return CPU tensors: each job moves its own "
                "batches to its device"
            )
        return super().reduce(value)

    def is_in_header(self, buffer: memoryview) -> bool:
        if buffer.nbytes <= _SMALL_BYTES or len(self.places) >= _MAX_PLACES:
            return True
        found = self._blocks.find(np.frombuffer(buffer, np.uint8))
        if found is not None and found[0] not in self.used and len(self.used) < _MAX_BLOCKS:
            self.used.append(found[0])
        if found is not None and found[0] in self.used:
            self.places.append((self.used.index(found[0]), found[1], buffer.nbytes))
        else:
            self.places.append(None)
        return False


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


def from_payload(
    header: bytes,
    places: Sequence[Place],
    mappings: Sequence[mmap.mmap],
    unpickler: type[pickle.Unpickler] = pickle.Unpickler,
) -> Any:
    """Return the value of a payload; its arrays and tensors are views of the mappings.

    Raises the unpickler's errors; damaged data may raise any exception.
    """
    buffers = [contents(mappings[block], start, size) for block, start, size in places]
    return unpickler(BytesIO(header or buffers.pop()), buffers=buffers).load()
