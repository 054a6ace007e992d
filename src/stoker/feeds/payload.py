"""Payloads: values that other processes read in place, in blocks of shared memory."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from stoker.basics import pytree
from stoker.feeds.shared_memory import Block, Blocks, contents
from stoker.transport.flatten import Flattener, aligned_offsets

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
