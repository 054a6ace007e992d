"""Values to and from another process: headers in a pipe, arrays in memory that both map.

Where there is no memfd, arrays cross in the pipe too.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from stoker.ipc.flatten import Flattener, starts_of

_PAGE_BYTES = 1 << 16


class Arena:
    """Memory for the arrays of one value at a time, written by one process and read by another.

    It is a memfd: it grows with what is put there, and the kernel frees it with its last owner.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size = 0

    @classmethod
    def create(cls) -> Arena | None:
        """Return a new one; None where the system has no memfd."""
        if not hasattr(os, "memfd_create"):
            return None
        return cls(os.memfd_create("stoker", os.MFD_CLOEXEC))

    @property
    def handle(self) -> str:
        """What another process of the same user opens it by."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def open(cls, handle: str) -> Arena:
        """Open what another process has created."""
        return cls(os.open(handle, os.O_RDWR | os.O_CLOEXEC))

    def put(self, buffers: Sequence[memoryview]) -> None:
        """Copy buffers into it, over what was there."""
        starts = starts_of([buffer.nbytes for buffer in buffers])
        if starts[-1] > self._size:
            os.ftruncate(self._descriptor, -(-starts[-1] * 5 // 4 // _PAGE_BYTES) * _PAGE_BYTES)
        view = self._view(starts[-1])
        for buffer, start in zip(buffers, starts, strict=False):
            view[start : start + buffer.nbytes] = buffer

    def get(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return buffers of these sizes that were put there, valid until others are."""
        starts = starts_of(sizes)
        view = self._view(starts[-1])
        return [view[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        """Close the descriptor; the memory goes when nothing maps it any more."""
        os.close(self._descriptor)
        self._map = None

    def _view(self, size: int) -> memoryview:
        if size > self._size:
            self._size = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, self._size)
        return memoryview(bytearray()) if self._map is None else memoryview(self._map)[:size]


def send(connection: Connection, value: Any, slot: int, arena: Arena | None) -> None:
    """Send a value, its arrays through the arena of a slot. Raises what pickling raises."""
    flattener = Flattener() if arena is not None else _InHeader()
    header = flattener.flatten(value)
    if arena is not None:
        arena.put(flattener.buffers)
    connection.send_bytes(pickle.dumps((slot, [buffer.nbytes for buffer in flattener.buffers])))
    connection.send_bytes(header)


def receive(connection: Connection, arenas: Sequence[Arena | None]) -> tuple[int, Any]:
    """Return the slot that a value came through, and the value: its arrays lie in that arena."""
    slot, sizes = pickle.loads(connection.recv_bytes())
    header = connection.recv_bytes()
    arena = arenas[slot]
    return slot, pickle.loads(header, buffers=arena.get(sizes) if arena is not None else ())


class _InHeader(Flattener):
    def is_in_header(self, buffer: memoryview) -> bool:
        return True
