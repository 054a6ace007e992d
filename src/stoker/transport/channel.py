"""Values to and from another process: headers in a pipe, arrays in memory that both map.

Without memfd, arrays go through the pipe, too.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.transport.flatten import ALIGNMENT, Flattener

# An arena grows in steps of this, so that arrays of varying size do not resize it each time.
_PAGE_BYTES = 1 << 16
# Arrays of less are copied sooner than looked after: a page, which an array of its own would take.
_SMALL_BYTES = 1 << 12

Span = tuple[int, int]
"""A buffer's offset in an arena, and its length."""


class Arena:
    """Memory for the arrays of one value at a time, written by one process and read by another.

    It is a memfd: it grows with its values, and the kernel frees it with its last owner.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size = 0
        self._end = 0  # of the arrays that were made in it for the next value
        self._made: list[tuple[NDArray[Any], int]] = []  # these, so that no address comes again

    @classmethod
    def create(cls) -> Arena | None:
        """Return a new one; None where the system has no memfd."""
        if not hasattr(os, "memfd_create"):
            return None
        return cls(os.memfd_create("stoker", os.MFD_CLOEXEC))

    @property
    def handle(self) -> str:
        """The path by which another process of the same user opens it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def open(cls, handle: str) -> Arena:
        """Open what another process has created."""
        return cls(os.open(handle, os.O_RDWR | os.O_CLOEXEC))

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised array in the arena, which ``put`` need not copy.

        It may be used until the next ``put``.
        """
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        start = self._end
        self._end = _aligned(start + size)
        self._grow(self._end)
        array: NDArray[Any] = np.ndarray(shape, dtype, self._room(self._end), start)
        self._made.append((array, start))
        return array

    def put(self, buffers: Sequence[memoryview]) -> list[Span]:
        """Put buffers into it, over the last ones; return each one's place.

        Buffers of arrays that were made in it are there already; the others are copied.
        """
        there = {_address(array): start for array, start in self._made}
        end, spans, copied = self._end, [], []
        for buffer in buffers:
            start = there.get(_address(np.asarray(buffer))) if there else None
            if start is None:
                start, end = end, _aligned(end + buffer.nbytes)
                copied.append((start, buffer))
            spans.append((start, buffer.nbytes))
        self._grow(end)
        room = self._room(end)
        for start, buffer in copied:
            room[start : start + buffer.nbytes] = buffer
        self._end = 0
        self._made.clear()
        return spans

    def get(self, spans: Sequence[Span]) -> list[memoryview]:
        """Return buffers, valid until the next ``put``."""
        room = self._room(max((start + size for start, size in spans), default=0))
        return [room[start : start + size] for start, size in spans]

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last mapping."""
        os.close(self._descriptor)
        self._map = None

    def _grow(self, size: int) -> None:
        if size > self._size and size > os.fstat(self._descriptor).st_size:
            # A quarter more, as values vary: each growth is a new mapping on both sides.
            os.ftruncate(self._descriptor, -(-size * 5 // 4 // _PAGE_BYTES) * _PAGE_BYTES)

    def _room(self, size: int) -> memoryview:
        """Return the memory, with the first ``size`` bytes."""
        if size > self._size:
            self._size = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, self._size)
        return memoryview(bytearray() if self._map is None else self._map)


class Unloadable(Exception):
    """A received value cannot be loaded; see its cause.

    Attributes:
        slot: the slot that it came through.
    """

    def __init__(self, slot: int) -> None:
        super().__init__(slot)
        self.slot = slot


def send(connection: Connection, value: Any, slot: int, arena: Arena | None) -> None:
    """Send a value, its arrays through the arena of a slot. Raises pickle's errors."""
    flattener = Flattener() if arena is not None else _InHeader()
    header = flattener.flatten(value)
    spans = arena.put(flattener.buffers) if arena is not None else []
    connection.send_bytes(pickle.dumps((slot, spans)))
    connection.send_bytes(header)


def receive(connection: Connection, arenas: Sequence[Arena | None]) -> tuple[int, Any]:
    """Return the slot that a value came through, and the value: its arrays lie in that arena.

    Raises Unloadable if loading fails.
    """
    slot, spans = pickle.loads(connection.recv_bytes())
    header = connection.recv_bytes()
    arena = arenas[slot]
    try:
        return slot, pickle.loads(header, buffers=arena.get(spans) if arena is not None else ())
    except Exception as error:
        raise Unloadable(slot) from error


class _InHeader(Flattener):
    def is_in_header(self, buffer: memoryview) -> bool:
        return True


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
