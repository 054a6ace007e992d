"""Somebody on the way between two hosts, without their token, who sees and changes what crosses."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from line import flip_at, line_to
from stoker.transport.link import Link, LinkError, LinkRefused, join_address, split_address
from stoker.transport.listener import Listener
from stoker.transport.secret import Secret

SECRET = Secret(b"t" * 32)
INSECURE = Secret(b"t" * 32, insecure=True)
PATIENCE_S = 120.0  # never waited for
FRAMES = [(b"header %d" % number, b"body %d" % number * 500) for number in range(4)]
SECRETS = [b"header", b"body", b"STKF"]
CLEAR_BYTES = 200  # before these, a side that listens says nothing encrypted


def serve(link: Link) -> None:
    """Send the frames, and then what comes back."""
    for header, body in FRAMES:
        link.send(header, body)
    while True:
        link.send(*link.receive())


def received(address: str, secret: Secret = SECRET) -> list[tuple[bytes, bytes]]:
    """Connect, and return what comes until the connection ends or all is there."""
    link = Link.connect(address, secret, "echo", timeout_s=PATIENCE_S)
    found = []
    try:
        with contextlib.suppress(LinkError, EOFError):
            for _ in FRAMES:
                header, body = link.receive(wait_s=PATIENCE_S)
                found.append((header, bytes(body)))
    finally:
        link.close()
    return found


def port_of(listener: Listener) -> int:
    return split_address(listener.address)[1]


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, SECRET, "echo", serve)
    yield listener
    listener.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, INSECURE, "echo", serve)
    yield listener
    listener.close()


def test_nothing_can_be_read(listener: Listener) -> None:
    with line_to(port_of(listener)) as way:
        assert received(way.address) == FRAMES
    assert len(way.back) > 2_000
    assert not any(secret in way.back + way.forth for secret in SECRETS)


def test_on_a_trusted_network_nothing_is_encrypted(plain: Listener) -> None:
    with line_to(port_of(plain)) as way:
        assert received(way.address, INSECURE) == FRAMES
    assert all(secret in way.back for secret in SECRETS)


def test_ipv6() -> None:
    try:
        within = Listener("::1", 0, SECRET, "echo", serve)
    except OSError:
        pytest.skip("this host has no IPv6")
    with contextlib.closing(within):
        assert received(within.address) == FRAMES


@given(st.integers(0, 8_000), st.integers(0, 7))
def test_whatever_is_changed_ends_the_connection(listener: Listener, place: int, bit: int) -> None:
    with line_to(port_of(listener), [flip_at(place, bit)]) as way:
        try:
            found = received(way.address)
        except LinkError:
            found = []
    assert found == FRAMES[: len(found)]
    # TLS takes no notice of the version that is written before what is not encrypted yet.
    assert len(found) < len(FRAMES) or place >= len(way.back) or place < CLEAR_BYTES


def test_who_takes_the_place_of_a_listener_learns_nothing() -> None:
    """That one has no certificate of the token, and believes everybody."""
    learned: list[bytes] = []

    def impostor() -> None:
        context = Secret(b"u" * 32).context(server=True)
        assert context is not None
        context.verify_mode = ssl.CERT_NONE
        with (
            listening.accept()[0] as victim,
            contextlib.suppress(OSError),
            context.wrap_socket(victim, server_side=True) as seen,
        ):
            learned.append(seen.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=impostor)
        thread.start()
        address = join_address("127.0.0.1", listening.getsockname()[1])
        with pytest.raises(LinkRefused, match="another token"):
            received(address)
        thread.join()
    assert not learned


def client_context(secret: Secret | None) -> ssl.SSLContext:
    context = None if secret is None else secret.context(server=False)
    if context is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.parametrize("name", ["no certificate", "of another token", "an older TLS"])
def test_who_takes_the_place_of_a_client_learns_nothing(listener: Listener, name: str) -> None:
    """Each of them believes everybody."""
    context = client_context(Secret(b"v" * 32) if name == "of another token" else None)
    if name == "an older TLS":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    learned = b""
    with (
        socket.create_connection(split_address(listener.address), PATIENCE_S) as connected,
        contextlib.suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(connected) as client,
    ):
        client.sendall(b"stoker\x00\x03" + b"echo".ljust(16, b"\x00") + bytes(32))
        learned = client.recv(1_000)
    assert learned == b""


def test_what_was_heard_on_a_trusted_network_opens_no_connection(plain: Listener) -> None:
    with line_to(port_of(plain)) as way:
        assert received(way.address, INSECURE) == FRAMES
    heard = bytes(way.forth)
    with socket.create_connection(split_address(plain.address), PATIENCE_S) as replaying:
        replaying.sendall(heard[:56])
        answered = replaying.recv(1_000)
        assert len(answered) == 88
        assert answered[24:] != way.back[24:88]
        replaying.sendall(heard[56:])
        with contextlib.suppress(ConnectionError):
            assert replaying.recv(1_000) == b""
