"""Values on their way from a feeder to its jobs: how they nest in bytes, arrays where they are.

A parcel is a pickled outline and a list of places. Arrays and tensors that lie in a feeder's
blocks are handed over by their place; larger ones that lie elsewhere, and what else takes room, are
copied into a block first. On the job's side a block is mapped privately: what is written to a view
there is seen by nobody else, and goes with the view.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker import pytree
from stoker.errors import FeedError
from stoker.ipc.blocks import GENERATION, HEAD_BYTES, Block, Blocks

INLINE_BYTES = 8192
"""Outlines up to this size travel in the message itself."""
_SMALL_BYTES = 4096  # arrays up to this size are part of the outline
_MOST_BLOCKS = 100  # in a message; the kernel passes 253 descriptors at a time
_MOST_PLACES = 1000  # in a message; more arrays become part of the outline
_ALIGNMENT = 64


@dataclass
class Payload:
    """A value, ready to be handed over. It keeps what it refers to in the blocks.

    Attributes:
        value: the value, and scratch memory: what keeps the blocks.
        outline: the pickled outline, if it is short; else it lies at ``outline_at`` (block, offset,
            length), else None.
        places: of each array, its block's number and its offset there.
        blocks: the blocks.
        nbytes: shared memory that the contents take.
    """

    value: Any
    outline: bytes
    outline_at: tuple[int, int, int] | None
    places: list[tuple[int, int]]
    blocks: list[Block]
    nbytes: int

    def mark(self, generation: int) -> None:
        """Give the blocks a generation, unless they have one that is still in use."""
        for block in self.blocks:
            if not block.users:
                block.mark(generation)
            block.users += 1

    def retire(self) -> None:
        """Say that nobody looks at it any more. Its memory may be written again."""
        for block in self.blocks:
            block.users -= 1
            if not block.users:
                block.mark(0)
        self.value = None
        self.blocks = []


def packed(value: Any, blocks: Blocks) -> Payload:
    """Get a value ready. What lies in no block is copied, the rest must not be written any more.

    Raises TypeError for what cannot be pickled.
    """
    pickler = _Packer(blocks)
    try:
        outline = pickler.dumped(value)
    except Exception as error:
        raise TypeError(f"a feed cannot hand this over: {error}") from error
    used = pickler.used
    places: list[tuple[int, int]] = []
    size = 0
    starts = []
    for array, found in pickler.arrays:
        starts.append(size)
        if found is None:
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    within = 0 if len(outline) <= INLINE_BYTES else len(outline)
    kept = [value]
    outline_at = None
    if size + within:
        scratch = blocks.scratch(size + within)
        kept.append(scratch)
        own = blocks.find(scratch)
        assert own is not None
        used = [*used, own[0]]
        at = len(used) - 1
        for (array, place), start in zip(pickler.arrays, starts, strict=True):
            if place is None:
                scratch[start : start + array.nbytes] = _bytes_of(array)
        if within:
            scratch[size : size + within] = np.frombuffer(outline, np.uint8)
            outline_at, outline = (at, own[1] + size, within), b""
    for (_, place), start in zip(pickler.arrays, starts, strict=True):
        places.append((len(used) - 1, start) if place is None else place)
    nbytes = sum(array.nbytes for array, _ in pickler.arrays) + within
    return Payload(kept, outline, outline_at, places, used, nbytes)


class _Packer(pickle.Pickler):
    """Pickles an outline; arrays and tensors in it are referred to by number."""

    def __init__(self, blocks: Blocks) -> None:
        self._stream = BytesIO()
        super().__init__(self._stream, 5)
        self._blocks = blocks
        self.used: list[Block] = []
        self.arrays: list[tuple[NDArray[Any], tuple[int, int] | None]] = []

    def dumped(self, value: Any) -> bytes:
        self.dump(value)
        return self._stream.getvalue()

    def persistent_id(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return None if value.dtype.hasobject else self._placed(value, None)
        if pytree.is_tensor(value):
            return self._tensor(value)
        return None

    def _tensor(self, tensor: Any) -> Any:
        import torch

        if (
            tensor.layout != torch.strided
            or tensor.is_quantized
            or type(tensor) is not torch.Tensor
        ):
            return None
        if tensor.device.type != "cpu":
            raise TypeError(f"a tensor on {tensor.device}: each job moves its batches by itself")
        plain = tensor.detach().resolve_conj().resolve_neg()
        try:
            return self._placed(plain.numpy(), "")
        except TypeError:  # a dtype that NumPy does not have
            words = plain.contiguous().view(_WORDS[tensor.dtype.itemsize](torch)).numpy()
            return self._placed(words, str(tensor.dtype).removeprefix("torch."))

    def _placed(self, array: NDArray[Any], tensor: str | None) -> Any:
        """Return what stands for an array, or (where ``tensor`` is given) a tensor, in an outline.

        Of strides is said where the array lies in a block already; a copy is C-ordered.
        """
        if array.nbytes <= _SMALL_BYTES or len(self.arrays) >= _MOST_PLACES:
            return tensor, array.dtype, array.shape, None, array.tobytes()
        found = self._blocks.find(array)
        if found is not None and found[0] not in self.used:
            if len(self.used) >= _MOST_BLOCKS:
                found = None
            else:
                self.used.append(found[0])
        if found is None:
            self.arrays.append((np.ascontiguousarray(array), None))
            return tensor, array.dtype, array.shape, None, len(self.arrays) - 1
        self.arrays.append((array, (self.used.index(found[0]), found[1])))
        strides = None if array.flags.c_contiguous else array.strides
        return tensor, array.dtype, array.shape, strides, len(self.arrays) - 1


_WORDS: dict[int, Any] = {
    1: lambda torch: torch.uint8,
    2: lambda torch: torch.int16,
    4: lambda torch: torch.int32,
    8: lambda torch: torch.int64,
}


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


# What follows runs in a job.


class Stale(Exception):
    """What a block holds is not what was announced."""


def mapped(descriptor: int, generation: int) -> mmap.mmap:
    """Map a block privately, and close its descriptor.

    Raises Stale when something else is in it by now; OSError or ValueError when it is no block.
    """
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("a block that may shrink would end who reads it")
        if os.fstat(descriptor).st_size <= HEAD_BYTES:
            raise ValueError("a block has contents behind its head")
        memory = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    check(memory, generation)
    return memory


def check(memory: mmap.mmap, generation: int) -> None:
    """Raise Stale unless a block still holds this generation."""
    if GENERATION.unpack_from(memory)[0] != generation:
        raise Stale


def keep(memory: mmap.mmap) -> None:
    """Make a mapping independent of the block: its pages become this process's own."""
    pages = np.frombuffer(memory, np.uint8)[HEAD_BYTES::4096]
    np.bitwise_or(pages, 0, out=pages)


def opened(
    outline: bytes,
    outline_at: Sequence[int] | None,
    places: Sequence[Sequence[int]],
    memories: Sequence[mmap.mmap],
) -> Any:
    """Return the value: its arrays are read-only views of the mappings, its tensors views.

    Raises FeedError when a class that it needs cannot be imported here, and anything when what came
    is damaged.
    """
    if outline_at is not None:
        number, start, size = outline_at
        outline = memories[number][HEAD_BYTES + start : HEAD_BYTES + start + size]
    return _Unpacker(outline, places, memories).load()


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, outline: bytes, places: Sequence[Sequence[int]], memories: Sequence[mmap.mmap]
    ) -> None:
        super().__init__(BytesIO(outline))
        self._places = places
        self._memories = memories

    def persistent_load(self, pid: Any) -> Any:
        tensor, dtype, shape, strides, where = pid
        if type(where) is bytes:
            memory: Any = where if tensor is None else bytearray(where)
            array: NDArray[Any] = np.ndarray(shape, dtype, memory)
        else:
            block, offset = self._places[where]
            array = np.ndarray(shape, dtype, self._memories[block], HEAD_BYTES + offset, strides)
        if tensor is None:
            array.flags.writeable = False
            return array
        import torch

        made = torch.from_numpy(array)
        return made.view(getattr(torch, tensor)) if tensor else made

    def find_class(self, module: str, name: str) -> Any:
        main = sys.modules["__main__"]
        if os.path.basename(getattr(main, "__file__", None) or "") == f"{module}.py":
            # The feeder has loaded this very script, as a module.
            with contextlib.suppress(AttributeError):
                found: Any = main
                for part in name.split("."):
                    found = getattr(found, part)
                return found
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise FeedError(
                f"what the feed hands out needs {module}.{name}, which this job cannot import "
                f"({error}): put the class into a module that both can import, or hand out tuples "
                "or dicts"
            ) from error
