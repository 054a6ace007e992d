"""Values on a connection between hosts: a pickle, and the arrays beside it.

Both ends of such a connection have proved that they have the pipeline's token, so received values
are unpickled. A frame without a header says that the other side is alive and at work.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

import numpy as np

from stoker.transport.flatten import Flattener, aligned_offsets
from stoker.transport.link import Buffer, Link, LinkError

_ALIVE = b""
# Buffers up to this size are copied sooner than sent as parts of their own: a page.
_IN_PICKLE_BYTES = 4096
# Between buffers: as many bytes as their alignment (transport/flatten.py).
_PADDING = bytes(64)


class FlatValue:
    """A value prepared for sending. Raises pickle's errors.

    Args:
        value: the value; its arrays must not change before it is sent.
    """

    def __init__(self, value: Any) -> None:
        flattener = _OnLink()
        buffers = [memoryview(flattener.flatten(value)), *flattener.buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        starts = aligned_offsets(sizes)
        self._header = struct.pack(f"<{len(sizes)}Q", *sizes)
        self._parts: list[Buffer] = []
        for n, buffer in enumerate(buffers):
            self._parts += (buffer, _PADDING[: starts[n + 1] - starts[n] - sizes[n]])

    def send(self, link: Link) -> None:
        """Send it. Raises LinkError."""
        link.send(self._header, *self._parts)


class Inbox:
    """Receives values into one buffer: a value's arrays are valid until the next value."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def receive(self, link: Link, *, wait_s: float | None = None) -> Any:
        """Return the next value; its sender shows every ``wait_s`` seconds that it is alive.

        Raises TimeoutError, EOFError and LinkError, as ``Link.receive`` does, and pickle's errors.
        """
        header = _ALIVE
        while header == _ALIVE:
            header, body = link.receive(self._place, wait_s=wait_s)
        sizes = struct.unpack(f"<{len(header) // 8}Q", header[: len(header) // 8 * 8])
        starts = aligned_offsets(sizes)
        if not sizes or len(header) % 8 or starts[-1] != body.nbytes:
            raise LinkError(f"{link.peer} sent a frame whose parts do not fit")
        first, *rest = (
            body[start : start + size] for start, size in zip(starts, sizes, strict=False)
        )
        return pickle.loads(first, buffers=rest)

    def _place(self, header: bytes, body_bytes: int) -> memoryview:
        if body_bytes > self._memory.nbytes:
            # A quarter more: bodies that vary a little do not each need new memory.
            self._memory = np.empty(body_bytes * 5 // 4, np.uint8)
        return self._memory[:body_bytes].data


def say_alive(link: Link) -> None:
    """Tell the other end that its request is being worked on. Raises LinkError."""
    link.send(_ALIVE)


class _OnLink(Flattener):
    def is_in_header(self, buffer: memoryview) -> bool:
        return buffer.nbytes <= _IN_PICKLE_BYTES
