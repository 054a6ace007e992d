"""Send values to another process of this host: headers in a pipe, arrays in shared memory."""

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

from stoker.transport.flatten import Flattener, address_of, align

# An arena grows in steps of this size, so that arrays of varying sizes do not resize it each time.
# Chosen, not measured.
_STEP_BYTES = 1 << 16
# Smaller arrays are not made in the arena: copying less than a page is cheaper than tracking it.
_SMALL_BYTES = 1 << 12

Span = tuple[int, int]
"""A buffer's offset in an arena, and its length."""


class Arena:
    """Shared memory for the arrays of one value at a time: one process writes, another reads.

    It is a memfd: it grows with its values, and the kernel frees it when no process uses it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size = 0
        # Arrays made in the arena for the next value: where they end, and the arrays themselves,
        # kept so that no other array gets the address of one.
        self._end = 0
        self._own_arrays: list[tuple[NDArray[Any], int]] = []

    @classmethod
    def create(cls) -> Arena:
        return cls(os.memfd_create("stoker", os.MFD_CLOEXEC))

    @property
    def handle(self) -> str:
        """The path under which another process of the same user can open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def open(cls, handle: str) -> Arena:
        """Open the arena of another process by its handle."""
        return cls(os.open(handle, os.O_RDWR | os.O_CLOEXEC))

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised array in the arena, which the next ``put`` need not copy."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        start = self._end
        self._end = align(start + size)
        self._grow(self._end)
        array: NDArray[Any] = np.ndarray(shape, dtype, self._memory(self._end), start)
        self._own_arrays.append((array, start))
        return array

    def put(self, buffers: Sequence[memoryview]) -> list[Span]:
        """Copy buffers into the arena, over the previous ones; return each one's place.

        Buffers of arrays that ``array`` returned are in the arena already and are not copied.
        """
        own_starts = {address_of(array): start for array, start in self._own_arrays}
        end, spans, copied = self._end, [], []
        for buffer in buffers:
            start = own_starts.get(address_of(np.asarray(buffer))) if own_starts else None
            if start is None:
                start, end = end, align(end + buffer.nbytes)
                copied.append((start, buffer))
            spans.append((start, buffer.nbytes))
        self._grow(end)
        memory = self._memory(end)
        for start, buffer in copied:
            memory[start : start + buffer.nbytes] = buffer
        self._end = 0
        self._own_arrays.clear()
        return spans

    def get(self, spans: Sequence[Span]) -> list[memoryview]:
        """Return the buffers at these places, valid until the next ``put``."""
        memory = self._memory(max((start + size for start, size in spans), default=0))
        return [memory[start : start + size] for start, size in spans]

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last mapping."""
        os.close(self._descriptor)
        self._map = None

    def _grow(self, size: int) -> None:
        if size > self._size and size > os.fstat(self._descriptor).st_size:
            # A quarter more than needed: each growth is a new mapping on both sides.
            os.ftruncate(self._descriptor, -(-size * 5 // 4 // _STEP_BYTES) * _STEP_BYTES)

    def _memory(self, size: int) -> memoryview:
        """Return the mapped memory, at least its first ``size`` bytes."""
        if size > self._size:
            self._size = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, self._size)
        return memoryview(bytearray() if self._map is None else self._map)


class Unloadable(Exception):
    """A value that came through ``slot`` cannot be unpickled; the cause says why."""

    def __init__(self, slot: int) -> None:
        super().__init__(slot)
        self.slot = slot


def send(connection: Connection, value: Any, slot: int, arena: Arena | None) -> None:
    """Send a value; its arrays go through the arena of ``slot``, or the pipe if that is None."""
    if arena is None:
        header, spans = pickle.dumps(value), list[Span]()
    else:
        flattener = Flattener()
        header = flattener.flatten(value)
        spans = arena.put(flattener.buffers)
    connection.send_bytes(pickle.dumps((slot, spans)))
    connection.send_bytes(header)


def receive(connection: Connection, arenas: Sequence[Arena | None]) -> tuple[int, Any]:
    """Receive a value, whose arrays are views of a slot's arena; return the slot and the value."""
    slot, spans = pickle.loads(connection.recv_bytes())
    header = connection.recv_bytes()
    arena = arenas[slot]
    try:
        return slot, pickle.loads(header, buffers=arena.get(spans) if arena is not None else ())
    except Exception as error:
        raise Unloadable(slot) from error
