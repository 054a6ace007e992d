"""Somebody on the way between two hosts, without their token, who sees and changes what crosses."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.transport import link as links
from stoker.transport.link import (
    Link,
    LinkError,
    LinkRefused,
    join_address,
    local_host_towards,
    split_address,
)
from stoker.transport.listener import Listener
from stoker.transport.tls import token_context

TOKEN = b"t" * 32
FRAMES = [(b"header %d" % number, b"body %d" % number * 500) for number in range(4)]
SECRETS = [b"header", b"body", b"STKF"]
HELLO_BYTES = 8 + 1 + 32 + 32  # what who listens says first: greeting, manner, challenge, proof
FRONT = struct.Struct("<4sIQ16s")

Alter = Callable[[bytes], bytes]
"""Is handed what crosses, as much as has come, and returns what goes on."""


def unchanged(data: bytes) -> bytes:
    return data


class OnTheWay:
    """Passes one connection on to an address, and all that crosses it through two functions.

    Attributes:
        forth, back: what came from who connected, and from who listens.
    """

    def __init__(self, address: str, forth: Alter = unchanged, back: Alter = unchanged) -> None:
        self.forth, self.back = bytearray(), bytearray()
        self._to = split_address(address)
        self._alter = forth, back
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = join_address("127.0.0.1", self._listening.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        with self._listening.accept()[0] as one, socket.create_connection(self._to) as two:
            ways = [(two, one, self.back, self._alter[1]), (one, two, self.forth, self._alter[0])]
            threads = [threading.Thread(target=self._pass_on, args=way) for way in ways]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    @staticmethod
    def _pass_on(a: socket.socket, b: socket.socket, seen: bytearray, alter: Alter) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                seen.extend(data)
                b.sendall(alter(data))
        for each in (a, b):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def serve(link: Link) -> None:
    """Send the frames, and then what comes back."""
    for header, body in FRAMES:
        link.send(header, body)
    while True:
        link.send(*link.receive())


def received(address: str) -> list[tuple[bytes, bytes]]:
    """Connect, and return what comes until the connection ends or all is there."""
    link = Link.connect(address, TOKEN, "echo", timeout_s=20)
    found = []
    try:
        with contextlib.suppress(LinkError, EOFError):
            for _ in FRAMES:
                header, body = link.receive(wait_s=20)
                found.append((header, bytes(body)))
    finally:
        link.close()
    return found


@pytest.fixture(scope="module")
def between_hosts() -> Iterator[Listener]:
    """Who listens here takes those who connect for processes of other hosts."""
    genuine = links.within_host
    listener = Listener("127.0.0.1", 0, TOKEN, "echo", serve)
    port = split_address(listener.address)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "within_host", lambda s: s.getsockname()[1] != port and genuine(s))
        yield listener
    listener.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, TOKEN, "echo", serve, insecure=True)
    yield listener
    listener.close()


def test_between_hosts_nothing_can_be_read(between_hosts: Listener) -> None:
    with contextlib.closing(OnTheWay(between_hosts.address)) as way:
        assert received(way.address) == FRAMES
    assert len(way.back) > 2_000
    assert not any(secret in way.back + way.forth for secret in SECRETS)


def test_a_host_that_connects_to_itself_encrypts_nothing() -> None:
    """On whatever interface; two hosts are in tests/cluster/test_overheard.py."""
    try:
        host = local_host_towards("192.0.2.1")
    except OSError:
        pytest.skip("this host has no interface but the loopback")
    with contextlib.closing(Listener(host, 0, TOKEN, "echo", serve)) as listener:
        link = Link.connect(listener.address, TOKEN, "echo", timeout_s=20)
        assert isinstance(link._socket, socket.socket)
        assert link.receive(wait_s=20) == FRAMES[0]
        link.close()


def test_within_a_host_and_on_a_trusted_network_nothing_is_encrypted(plain: Listener) -> None:
    with contextlib.closing(Listener("127.0.0.1", 0, TOKEN, "echo", serve)) as within:
        for listener in (within, plain):
            with contextlib.closing(OnTheWay(listener.address)) as way:
                assert received(way.address) == FRAMES
            assert all(secret in way.back for secret in SECRETS)


def test_an_ipv6_loopback_is_a_loopback() -> None:
    try:
        within = Listener("::1", 0, TOKEN, "echo", serve)
    except OSError:
        pytest.skip("this host has no IPv6")
    with contextlib.closing(within):
        link = Link.connect(within.address, TOKEN, "echo", timeout_s=20)
        assert isinstance(link._socket, socket.socket)
        link.close()


@given(st.integers(HELLO_BYTES + 1, 8_000), st.integers(0, 7))
def test_whatever_is_changed_ends_an_encrypted_connection(
    between_hosts: Listener, place: int, bit: int
) -> None:
    at = 0

    def flip(data: bytes) -> bytes:
        nonlocal at
        start, at = at, at + len(data)
        if start <= place < at:
            changed = bytearray(data)
            changed[place - start] ^= 1 << bit
            return bytes(changed)
        return data

    with contextlib.closing(OnTheWay(between_hosts.address, back=flip)) as way:
        try:
            found = received(way.address)
        except LinkError:
            found = []
    assert found == FRAMES[: len(found)]
    assert len(found) < len(FRAMES) or place >= at


@pytest.mark.parametrize("manner", [b"h", b"i", b"c", b"x"])
def test_nobody_on_the_way_can_have_less_encrypted(between_hosts: Listener, manner: bytes) -> None:
    def weaken(data: bytes) -> bytes:
        assert data[8:9] == b"t"
        return data[:8] + manner + data[9:]

    with (
        contextlib.closing(OnTheWay(between_hosts.address, back=weaken)) as way,
        pytest.raises(LinkRefused, match="another token"),
    ):
        received(way.address)
    assert len(way.back) == HELLO_BYTES


def test_who_passes_the_proofs_on_gets_no_further(between_hosts: Listener) -> None:
    """Whoever takes the place of one side after that has no certificate of the token."""
    host, port = split_address(between_hosts.address)
    ended: list[BaseException] = []

    def impostor() -> None:
        with listening.accept()[0] as victim, socket.create_connection((host, port)) as real:
            real.sendall(victim.recv(1_000))
            victim.sendall(real.recv(1_000))
            victim.recv(32)
            try:
                mine = token_context(b"u" * 32, server=True)
                mine.verify_mode = ssl.CERT_NONE
                with mine.wrap_socket(victim, server_side=True) as seen:
                    seen.send(b"\x01")
                    seen.recv(1)
            except OSError as error:
                ended.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=impostor)
        thread.start()
        address = join_address("127.0.0.1", listening.getsockname()[1])
        with pytest.raises(LinkError, match="without the token answers in place of"):
            received(address)
        thread.join()
    assert ended


def test_what_passes_connections_on_within_a_host_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One side is asked from its own host, and the other one asks another host."""
    listener = Listener("127.0.0.1", 0, TOKEN, "echo", serve)
    port = split_address(listener.address)[1]
    monkeypatch.setattr(links, "within_host", lambda s: s.getsockname()[1] == port)
    with (
        contextlib.closing(listener),
        pytest.raises(LinkRefused, match="A proxy or tunnel there"),
    ):
        received(listener.address)


# -- frames that are where they do not belong, on a connection that is not encrypted


def frames_of(data: bytes) -> tuple[bytes, list[bytes]]:
    """Return what comes before the frames, and the whole frames."""
    start = HELLO_BYTES + 1
    rest, frames = data[start:], []
    while len(rest) >= FRONT.size:
        _, header, body, _ = FRONT.unpack_from(rest)
        end = FRONT.size + header + body
        if len(rest) < end:
            break
        frames.append(rest[:end])
        rest = rest[end:]
    return data[:start], frames


class Rearranged:
    """Lets the beginning through, waits for all frames, and sends others in their place."""

    def __init__(self, change: Callable[[list[bytes]], list[bytes]]) -> None:
        self._change = change
        self._seen = b""
        self._is_done = False

    def __call__(self, data: bytes) -> bytes:
        start = len(self._seen)
        self._seen += data
        beginning, frames = frames_of(self._seen)
        if not self._is_done and len(frames) == len(FRAMES):
            self._is_done = True
            return beginning[start:] + b"".join(self._change(frames))
        return beginning[start:]


def of_another_connection(address: str) -> list[bytes]:
    with contextlib.closing(OnTheWay(address)) as way:
        assert received(way.address) == FRAMES
    return frames_of(bytes(way.back))[1]


REARRANGED: dict[str, Callable[[list[bytes], list[bytes]], list[bytes]]] = {
    "replayed": lambda frames, _: [frames[0], frames[0], *frames[1:]],
    "left out": lambda frames, _: frames[1:],
    "left out later": lambda frames, _: [frames[0], *frames[2:], frames[1]],
    "moved": lambda frames, _: [frames[1], frames[0], *frames[2:]],
    "of another connection": lambda _, others: others,
    "one of another connection": lambda frames, others: [frames[0], others[1], *frames[2:]],
    "made": lambda frames, _: [frames[0][:16] + bytes(16) + frames[0][32:], *frames[1:]],
    "of other size": lambda frames, _: [
        frames[0][:4] + struct.pack("<I", 0) + frames[0][8:], *frames[1:]
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REARRANGED)
def test_frames_that_do_not_belong_there_end_the_connection(plain: Listener, name: str) -> None:
    others = of_another_connection(plain.address)
    change = Rearranged(lambda frames: REARRANGED[name](frames, others))
    with contextlib.closing(OnTheWay(plain.address, back=change)) as way:
        found = received(way.address)
    assert found == FRAMES[: len(found)]
    assert len(found) < len(FRAMES)


def test_a_frame_that_is_sent_back_is_none() -> None:
    """What one side has said is not what the other one says."""
    listener = Listener("127.0.0.1", 0, TOKEN, "echo", serve, insecure=True)
    with contextlib.closing(listener):
        host, port = split_address(listener.address)
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def mirror() -> None:
                with listening.accept()[0] as one, socket.create_connection((host, port)) as two:
                    two.sendall(one.recv(1_000))
                    one.sendall(two.recv(1_000))
                    two.sendall(one.recv(32))
                    one.sendall(two.recv(1))
                    one.sendall(one.recv(1_000))

            thread = threading.Thread(target=mirror)
            thread.start()
            address = join_address("127.0.0.1", listening.getsockname()[1])
            link = Link.connect(address, TOKEN, "echo", timeout_s=20)
            link.send(b"mine", b"body")
            with pytest.raises(LinkError, match="out of order or forged"):
                link.receive(wait_s=20)
            thread.join()


def test_challenges_and_keys_are_those_of_one_connection(plain: Listener) -> None:
    seen = [of_another_connection(plain.address) for _ in range(3)]
    for one, other in pairwise(seen):
        assert not set(one) & set(other)
