"""Payloads: values handed over in place, in blocks of shared memory."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.transport.flatten import Flattener, starts_of
from stoker.transport.shared_memory import Block, Blocks, contents

Place = tuple[int, int, int]
"""Where a buffer lies: the number of its block, its offset there and its size."""
# Headers up to this size travel in the message itself: two pages are copied sooner than a block is
# mapped.
_INLINE_BYTES = 8192
# Buffers up to this size are part of the header: a page, the least that memory is shared by.
_SMALL_BYTES = 4096
# The kernel passes 253 descriptors at a time, of which others in the message need some.
_MOST_BLOCKS = 100
# The buffers of more arrays become part of the header, so that a receiver can bound its reads.
_MOST_PLACES = 1000


@dataclass
class Payload:
    """A value in blocks of shared memory, ready to be handed over; it keeps the blocks alive.

    Attributes:
        owners: the objects that keep the blocks alive: the value, and scratch memory.
        header: the header; empty if it is long and stored in the last place.
        places: the buffers' places.
        blocks: the blocks.
        nbytes: shared memory that it takes.
    """

    owners: list[Any]
    header: bytes
    places: list[Place]
    blocks: list[Block]
    nbytes: int

    def mark(self, generation: int) -> None:
        """Give the blocks a generation, unless they have one that is still in use."""
        for block in self.blocks:
            if not block.users:
                block.mark(generation)
            block.users += 1

    def retire(self) -> None:
        """Note that no job maps it any more. Its memory may be written again."""
        for block in self.blocks:
            block.users -= 1
            if not block.users:
                block.mark(0)
        self.owners = []
        self.blocks = []


def pack(value: Any, blocks: Blocks) -> Payload:
    """Prepare a value for handing over.

    Arrays in ``blocks`` are handed over in place, and must not be written any more; others are
    copied there. Arrays come out read-only, tensors do not.

    Raises TypeError for a value that cannot be pickled.
    """
    placer = _Placer(blocks)
    try:
        header = placer.flatten(value)
    except Exception as error:
        raise TypeError(f"a feed cannot hand this over: {error}") from error
    if len(header) > _INLINE_BYTES:
        placer.buffers.append(memoryview(header))
        placer.places.append(None)
        header = b""
    sizes = [buffer.nbytes for buffer in placer.buffers]
    homeless = [n for n, place in enumerate(placer.places) if place is None]
    places = [place or (0, 0, 0) for place in placer.places]
    owners = [value]
    if homeless:
        *starts, end = starts_of([sizes[n] for n in homeless])
        scratch = blocks.scratch(end)
        owners.append(scratch)
        found = blocks.find(scratch)
        assert found is not None
        for n, start in zip(homeless, starts, strict=True):
            scratch.data[start : start + sizes[n]] = placer.buffers[n]
            places[n] = len(placer.used), found[1] + start, sizes[n]
        placer.used.append(found[0])
    return Payload(owners, header, places, placer.used, sum(sizes))


class _Placer(Flattener):
    """Finds the buffers in blocks.

    Attributes:
        used: the blocks.
        places: each buffer's place, None for a buffer outside all blocks.
    """

    read_only = True

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks = blocks
        self.used: list[Block] = []
        self.places: list[Place | None] = []

    def reduced(self, value: Any) -> Any:
        if pytree.is_tensor(value) and value.device.type != "cpu":
            raise TypeError(f"a tensor on {value.device}: each job moves its batches by itself")
        return super().reduced(value)

    def has_place(self, array: NDArray[Any]) -> bool:
        return array.nbytes > _SMALL_BYTES and self._blocks.find(array) is not None

    def is_in_header(self, buffer: memoryview) -> bool:
        if buffer.nbytes <= _SMALL_BYTES or len(self.places) >= _MOST_PLACES:
            return True
        found = self._blocks.find(np.frombuffer(buffer, np.uint8))
        if found is not None and found[0] not in self.used and len(self.used) < _MOST_BLOCKS:
            self.used.append(found[0])
        if found is not None and found[0] in self.used:
            self.places.append((self.used.index(found[0]), found[1], buffer.nbytes))
        else:
            self.places.append(None)
        return False


def unpack(
    header: bytes,
    places: Sequence[Place],
    mappings: Sequence[mmap.mmap],
    unpickler: type[pickle.Unpickler] = pickle.Unpickler,
) -> Any:
    """Return the value of a payload; its arrays and tensors are views of the mappings.

    Raises the unpickler's errors, and any error for damaged data.
    """
    buffers = [contents(mappings[block], start, size) for block, start, size in places]
    return unpickler(BytesIO(header or buffers.pop()), buffers=buffers).load()
