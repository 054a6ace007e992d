"""Connections between hosts: who gets one, what crosses it, and what damage does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from authority import certificates
from scripts import reserved_port
from stoker import TokenError
from stoker.transport.link import (
    Link,
    LinkError,
    LinkRefused,
    join_address,
    local_host_towards,
    split_address,
)
from stoker.transport.listener import Listener
from stoker.transport.secret import (
    Certificates,
    Secret,
    host_certificates,
    make_token_file,
    new_token,
    read_token,
)

TOKEN = b"t" * 32
SECRET = Secret(TOKEN)
OTHER = Secret(b"u" * 32)
INSECURE = Secret(TOKEN, insecure=True)
PATIENCE_S = 120.0  # never waited for


def echo(link: Link) -> None:
    """Send every frame back."""
    while True:
        header, body = link.receive()
        link.send(header, body)


@pytest.fixture(scope="module")
def echoing() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, SECRET, "echo", echo)
    yield listener
    listener.close()


def check_echo(link: Link) -> None:
    link.send(b"fine")
    assert link.receive(wait_s=PATIENCE_S)[0] == b"fine"


@contextlib.contextmanager
def stranger(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Have somebody else serve one connection; yield the address."""

    def accept() -> None:
        with listening.accept()[0] as whom, contextlib.suppress(OSError):
            serve(whom)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept)
        thread.start()
        yield join_address("127.0.0.1", listening.getsockname()[1])
        thread.join()


def connected(listener: Listener, secret: Secret = SECRET, purpose: str = "echo") -> Link:
    return Link.connect(listener.address, secret, purpose, timeout_s=PATIENCE_S)


@given(st.lists(st.tuples(st.binary(max_size=300), st.lists(st.binary(max_size=5_000)))))
def test_frames_arrive_as_they_were_sent_count(
    echoing: Listener, frames: list[tuple[bytes, list[bytes]]]
) -> None:
    with contextlib.closing(connected(echoing)) as link:
        for header, parts in frames:
            link.send(header, *parts)
            found, body = link.receive(wait_s=PATIENCE_S)
            assert (found, bytes(body)) == (header, b"".join(parts))


def test_a_body_goes_where_its_header_says(echoing: Listener) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8)
    place = np.empty_like(data)
    with contextlib.closing(connected(echoing)) as link:
        sender = threading.Thread(target=link.send, args=(b"big", *np.split(data, 3_000)))
        sender.start()
        header, body = link.receive(lambda header, size: place.data[:size], wait_s=PATIENCE_S)
        sender.join()
    assert header == b"big"
    np.testing.assert_array_equal(place, data)
    assert np.shares_memory(np.asarray(body), place)


@pytest.fixture(scope="module")
def plain() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, INSECURE, "echo", echo)
    yield listener
    listener.close()


def test_who_has_another_token_is_told(echoing: Listener, plain: Listener) -> None:
    with pytest.raises(LinkRefused, match="another token"):
        connected(echoing, OTHER)
    with pytest.raises(LinkRefused, match="another token"):
        connected(plain, Secret(b"u" * 32, insecure=True))


def test_another_service_is_refused(echoing: Listener, plain: Listener) -> None:
    for listener, secret in ((echoing, SECRET), (plain, INSECURE)):
        with pytest.raises(LinkRefused, match="no cache of this version listens"):
            connected(listener, secret, purpose="cache")


def test_a_trusted_network_is_one_for_both_ends(echoing: Listener, plain: Listener) -> None:
    with contextlib.closing(connected(plain, INSECURE)) as link:
        check_echo(link)
    with pytest.raises(LinkRefused, match=r"does not encrypt .*insecure=True here"):
        connected(plain)
    with pytest.raises(LinkError, match="leave out insecure=True here"):
        connected(echoing, INSECURE)


def test_without_the_package_nothing_is_encrypted_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ["cryptography", *(n for n in sys.modules if n.startswith("cryptography."))]:
        monkeypatch.setitem(sys.modules, name, None)
    secret = Secret(new_token())
    with pytest.raises(ImportError, match=r"pip install cryptography"):
        Listener("127.0.0.1", 0, secret, "echo", echo)
    with pytest.raises(ImportError, match=r"pip install cryptography"):
        Link.connect("127.0.0.1:9", secret, "echo", timeout_s=PATIENCE_S)
    with contextlib.closing(Listener("127.0.0.1", 0, INSECURE, "echo", echo)) as listener:
        connected(listener, INSECURE).close()


def test_nobody_there() -> None:
    with reserved_port() as port, pytest.raises(LinkError, match="does not answer"):
        Link.connect(join_address("127.0.0.1", port), SECRET, "echo", timeout_s=1)
    with pytest.raises(LinkError, match=r"10\.0\.0\.\.5:80 does not answer"):
        Link.connect("10.0.0..5:80", SECRET, "echo", timeout_s=1)


def test_somebody_who_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = join_address("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(LinkError, match="did not complete the connection"):
            Link.connect(address, SECRET, "echo", timeout_s=0.1)


def test_a_service_without_the_token_learns_nothing() -> None:
    def impostor(whom: socket.socket) -> None:
        heard.append(whom.recv(1_000)[56:])
        whom.sendall(b"stoker\x00\x03" + b"echo".ljust(16, b"\x00") + bytes(64))
        heard.append(whom.recv(1_000))

    heard: list[bytes] = []
    with stranger(impostor) as address, pytest.raises(LinkError, match="another token"):
        Link.connect(address, INSECURE, "echo", timeout_s=PATIENCE_S)
    assert heard == [b"", b""]


def test_silence_before_a_frame_leaves_the_connection(echoing: Listener) -> None:
    with contextlib.closing(connected(echoing)) as link:
        with pytest.raises(TimeoutError, match=r"sent nothing for 0\.01 s"):
            link.receive(wait_s=0.01)
        check_echo(link)


def test_who_says_nothing_keeps_nobody_out(
    echoing: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are; those who came first are closed for it."""
    monkeypatch.setattr("stoker.transport.listener._AUTHENTICATE_S", 3600.0)
    with contextlib.ExitStack() as ends:
        silent = [ends.enter_context(raw(echoing)) for _ in range(100)]
        with contextlib.closing(connected(echoing)) as link:
            check_echo(link)
        with contextlib.suppress(ConnectionError):
            assert silent[0].recv(1) == b""


def test_closing_wakes_who_waits(echoing: Listener) -> None:
    link = connected(echoing)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            link.receive()
        except (EOFError, LinkError) as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    link.close()
    waiting.join()
    assert ended


def test_a_listener_ends_its_connections() -> None:
    listener = Listener("127.0.0.1", 0, SECRET, "echo", echo)
    link = connected(listener)
    check_echo(link)
    listener.close()
    with pytest.raises((EOFError, LinkError)):
        link.receive(wait_s=PATIENCE_S)
    link.close()
    with pytest.raises(LinkError):
        connected(listener)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("other-tls"))


@pytest.fixture(params=["token", "certificates"])
def encrypting(request: pytest.FixtureRequest, files: Certificates) -> Iterator[Encrypting]:
    secret = Secret(TOKEN, files if request.param == "certificates" else None)
    listener = Listener("127.0.0.1", 0, secret, "echo", echo)
    yield Encrypting(listener.address, secret)
    listener.close()


class Encrypting(NamedTuple):
    address: str
    secret: Secret

    def connect(self, address: str = "") -> Link:
        return Link.connect(address or self.address, self.secret, "echo", timeout_s=PATIENCE_S)


def test_encrypted(encrypting: Encrypting) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8)
    link = encrypting.connect()
    for _ in range(3):
        sender = threading.Thread(target=link.send, args=(b"secret", data[:7], data))
        sender.start()
        _, body = link.receive(wait_s=PATIENCE_S)
        sender.join()
        np.testing.assert_array_equal(np.asarray(body), np.concatenate([data[:7], data]))
    with pytest.raises(TimeoutError, match="sent nothing"):
        link.receive(wait_s=0.01)
    other = dataclasses.replace(encrypting.secret, token=b"u" * 32)
    with pytest.raises(LinkRefused, match="another token"):
        Link.connect(encrypting.address, other, "echo", timeout_s=PATIENCE_S)


def test_both_ends_of_an_encrypted_connection_may_be_busy(encrypting: Encrypting) -> None:
    """One thread sends all the time, another receives: neither waits for the other."""
    link = encrypting.connect()
    sent = [bytes([number % 256]) * (number * 37 % 5_000) for number in range(1_500)]

    def send() -> None:
        for number, body in enumerate(sent):
            link.send(b"%d" % number, body)

    sender = threading.Thread(target=send)
    sender.start()
    for number, body in enumerate(sent):
        assert link.receive(wait_s=PATIENCE_S) == (b"%d" % number, body)
    sender.join()


def test_certificates_are_for_both_ends_or_neither(
    echoing: Listener, plain: Listener, files: Certificates
) -> None:
    ours = Secret(TOKEN, files)
    with contextlib.closing(Listener("127.0.0.1", 0, ours, "echo", echo)) as encrypting:
        with pytest.raises(LinkRefused, match="encrypts connections with certificates, but"):
            connected(encrypting)
        with pytest.raises(LinkError, match="leave out insecure=True here"):
            connected(encrypting, INSECURE)
        insecure = Secret(TOKEN, files, insecure=True)
        connected(encrypting, insecure).close()
    for listener in (echoing, plain):
        with pytest.raises(LinkRefused, match="does not encrypt connections"):
            connected(listener, ours)


def test_certificates_of_another_authority(files: Certificates, other_files: Certificates) -> None:
    believer = Certificates(other_files.certificate, other_files.key, files.authority)
    ours = Secret(TOKEN, files)
    for theirs, message in (
        (other_files, "this host's authority did not sign its certificate"),
        (believer, "it rejected this host's certificate"),
    ):
        with contextlib.closing(Listener("127.0.0.1", 0, ours, "echo", echo)) as here:
            with pytest.raises(LinkRefused, match=message):
                connected(here, Secret(TOKEN, theirs))
            link = connected(here, ours)
            check_echo(link)


def test_files_that_cannot_be_used_are_named(
    files: Certificates, other_files: Certificates, tmp_path: Path
) -> None:
    for wrong in (
        Certificates(files.certificate, other_files.key, files.authority),
        Certificates(tmp_path / "none", files.key, files.authority),
    ):
        with pytest.raises(TokenError, match=f"connections with {wrong.certificate}"):
            Listener("127.0.0.1", 0, Secret(TOKEN, wrong), "echo", echo)


def test_the_files_of_a_host(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("STOKER_TLS_FOLDER", raising=False)
    assert host_certificates() is None
    rays = {"CERT": files.certificate, "KEY": files.key}
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(files.authority))
    for name, path in rays.items():
        monkeypatch.setenv(f"RAY_TLS_SERVER_{name}", str(path))
    assert host_certificates() == files
    shutil.copytree(files.key.parent, tmp_path / ".config" / "stoker" / "tls")
    found = host_certificates()
    assert found is not None
    assert found.key == tmp_path / ".config" / "stoker" / "tls" / "key.pem"
    monkeypatch.setenv("STOKER_TLS_FOLDER", str(files.key.parent))
    assert host_certificates() == files
    monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path / "none"))
    with pytest.raises(TokenError, match=r"STOKER_TLS_FOLDER names .*no such folder"):
        host_certificates()
    monkeypatch.delenv("STOKER_TLS_FOLDER")
    found.key.chmod(0o640)
    with pytest.raises(TokenError, match=r"other users can read .*chmod 600"):
        host_certificates()


def test_connections_are_the_process_own(echoing: Listener) -> None:
    with contextlib.closing(connected(echoing)) as link:
        child = os.fork()
        if child == 0:
            try:
                link.receive(wait_s=0)
            except LinkError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        check_echo(link)


def raw(listener: Listener) -> socket.socket:
    host, port = split_address(listener.address)
    return socket.create_connection((host, port), PATIENCE_S)


@given(st.binary(max_size=200), st.booleans())
def test_strangers_harm_nobody(
    echoing: Listener, plain: Listener, sent: bytes, is_plain: bool
) -> None:
    # It hangs up as soon as it knows, behind an alert of TLS, or a nonce and a proof.
    listener, secret, most = (plain, INSECURE, 88) if is_plain else (echoing, SECRET, 7)
    with raw(listener) as connection, contextlib.suppress(OSError):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert len(connection.recv(1_000)) <= most
    with contextlib.closing(connected(listener, secret)) as link:
        check_echo(link)


@given(st.binary(max_size=200), st.booleans(), st.sampled_from([SECRET, INSECURE]))
def test_who_connects_to_a_stranger_is_told(
    said: bytes, is_like_ours: bool, secret: Secret
) -> None:
    """Whatever that one says, and however it begins."""

    def serve(whom: socket.socket) -> None:
        whom.sendall(b"stoker\x00\x03" * is_like_ours + said)
        whom.shutdown(socket.SHUT_WR)
        while whom.recv(1_000):
            pass

    with stranger(serve) as address, pytest.raises(LinkError):
        Link.connect(address, secret, "echo", timeout_s=PATIENCE_S)


@given(st.binary(min_size=1, max_size=50), st.integers(0, 15), st.integers(0, 7))
def test_frames_of_other_sizes_end_the_connection(
    echoing: Listener, header: bytes, place: int, bit: int
) -> None:
    """A peer that lies about sizes is found out, and costs no more than its connection."""
    link = connected(echoing)
    frame = bytearray(struct.pack("<4sIQ", b"STKF", len(header), 3) + header + b"abc")
    frame[place] ^= 1 << bit
    with contextlib.suppress(OSError):  # it may be gone before that
        link._socket.sendall(frame)
        socket.socket.shutdown(link._socket, socket.SHUT_WR)
    with contextlib.suppress(EOFError, LinkError):  # what is shorter now may be a frame
        assert len(link.receive(wait_s=PATIENCE_S)[0]) < len(header) + 3
    with pytest.raises((EOFError, LinkError)):
        link.receive(wait_s=PATIENCE_S)


@pytest.mark.parametrize("lie", [(b"STKF", 1 << 31, 0), (b"STKF", 1, 1 << 40), (b"GET ", 1, 1)])
def test_who_announces_too_much_is_not_believed(lie: tuple[bytes, int, int]) -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Link(ours, "a liar", 5.0)) as link:
        theirs.sendall(struct.pack("<4sIQ", *lie))
        with pytest.raises(LinkError, match="sent bytes that are not a frame"):
            link.receive(wait_s=PATIENCE_S)


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:port", "::1:80", "h:70000"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="an address must be host:port"):
        split_address(address)


@pytest.mark.parametrize("address", ["host:80", "127.0.0.1:0", "[::1]:8080"])
def test_addresses(address: str) -> None:
    assert join_address(*split_address(address)) == address


def test_the_interface_that_leads_to_a_host() -> None:
    assert local_host_towards("127.0.0.1") == "127.0.0.1"


def test_tokens_stay_in_files_of_their_user(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    token = make_token_file(path)
    assert make_token_file(path) == read_token(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.chmod(0o640)
    with pytest.raises(TokenError, match=r"other users can read .*chmod 600"):
        read_token(path)


def test_what_is_no_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="cannot read the token in"):
        read_token(tmp_path / "none")
    path = tmp_path / "short"
    path.touch(0o600)
    path.write_text(new_token().hex()[:-2])
    with pytest.raises(TokenError, match="holds no token"):
        read_token(path)


@pytest.mark.timeout(60)
def test_what_could_be_waited_for_is_no_token_file(tmp_path: Path, files: Certificates) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, Path("/dev/null"), tmp_path):
        with pytest.raises(TokenError, match=f"{path}"):
            read_token(path)
    for wrong in (
        Certificates(pipe, files.key, files.authority),
        Certificates(files.certificate, pipe, files.authority),
        Certificates(files.certificate, files.key, pipe),
    ):
        with pytest.raises(TokenError, match=f"{pipe} is not a regular file"):
            Listener("127.0.0.1", 0, Secret(TOKEN, wrong), "echo", echo)
