"""A line between the processes of a test, which sees what crosses, and fails as it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Damage = Callable[[int, bytes], bytes | None]
"""What becomes of bytes behind so many others on their way to who connects; None: it is cut."""


@dataclass
class Line:
    """What connects to ``port`` is passed on; ``forth`` and ``back`` have all that crossed."""

    port: int
    forth: bytearray = field(default_factory=bytearray)
    back: bytearray = field(default_factory=bytearray)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.contextmanager
def line_to(port: int, damages: Sequence[Damage] = ()) -> Iterator[Line]:
    """Pass connections on to a port of this host, each with a damage in turn.

    Those behind the last damage are passed on as they are.
    """
    left = list(damages)
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        threads.append(thread)
        thread.start()

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                near.close()
                continue
            ends.extend((near, far))
            start(forward, near, far, line.forth, lambda _, data: data)
            start(forward, far, near, line.back, left.pop(0) if left else lambda _, data: data)

    def forward(source: socket.socket, to: socket.socket, seen: bytearray, damage: Damage) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                changed = damage(sent, data)
                if changed is None:
                    break
                to.sendall(changed)
                sent += len(data)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    listener = socket.create_server(("127.0.0.1", 0))
    line = Line(listener.getsockname()[1])
    start(accept)
    try:
        yield line
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(threads):
            thread.join()
        for end in (listener, *ends):
            end.close()


def cut_at(size: int) -> Damage:
    """Cut a connection behind so many bytes."""

    def damage(sent: int, data: bytes) -> bytes | None:
        return data if sent + len(data) < size else None

    return damage


def flip_at(place: int, bit: int = 6) -> Damage:
    """Change one bit of a byte."""

    def damage(sent: int, data: bytes) -> bytes | None:
        if sent <= place < sent + len(data):
            at = place - sent
            data = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        return data

    return damage
