"""A line between the processes of a test that fails as it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Damage = Callable[[int, bytes], bytes | None]
"""What becomes of bytes behind so many others on their way to who connects; None: it is cut."""


@contextlib.contextmanager
def line_to(port: int, damages: list[Damage]) -> Iterator[int]:
    """Forward what connects to the port that is yielded, each connection with a damage in turn.

    Those behind the last damage are forwarded as they are.
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
            start(forward, near, far, lambda _, data: data)
            start(forward, far, near, left.pop(0) if left else lambda _, data: data)

    def forward(source: socket.socket, to: socket.socket, damage: Damage) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = damage(sent, data)
                if changed is None:
                    break
                to.sendall(changed)
                sent += len(data)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    listener = socket.create_server(("127.0.0.1", 0))
    start(accept)
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(threads):
            thread.join(10)
        for end in (listener, *ends):
            end.close()


def cut_at(size: int) -> Damage:
    """Cut a connection behind so many bytes."""

    def damage(sent: int, data: bytes) -> bytes | None:
        return data if sent + len(data) < size else None

    return damage


def flip_at(place: int) -> Damage:
    """Change one byte."""

    def damage(sent: int, data: bytes) -> bytes | None:
        if sent <= place < sent + len(data):
            at = place - sent
            data = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        return data

    return damage
