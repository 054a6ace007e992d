"""Connections between hosts: who gets one, what crosses it, and what damage does."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from authority import certificates
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
from stoker.transport.tls import Tls, host_tls
from stoker.transport.token import make_token_file, new_token, read_token

TOKEN = b"t" * 32


def echo(link: Link) -> None:
    """Send every frame back."""
    while True:
        header, body = link.receive()
        link.send(header, body)


@pytest.fixture(scope="module")
def echoing() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, TOKEN, "echo", echo)
    yield listener
    listener.close()


@contextlib.contextmanager
def overheard(address: str, seen: bytearray) -> Iterator[str]:
    """Pass one connection on to an address; what crosses it, either way, is seen."""

    def passed_on(from_whom: socket.socket, to: socket.socket) -> None:
        while data := from_whom.recv(1 << 16):
            seen.extend(data)
            to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with listening.accept()[0] as one, socket.create_connection(split_address(address)) as two:
            back = threading.Thread(target=passed_on, args=(two, one))
            back.start()
            passed_on(one, two)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield join_address("127.0.0.1", listening.getsockname()[1])
        thread.join()


def connected(listener: Listener, token: bytes = TOKEN, purpose: str = "echo") -> Link:
    return Link.connect(listener.address, token, purpose, timeout_s=5)


@given(st.lists(st.tuples(st.binary(max_size=300), st.lists(st.binary(max_size=5_000)))))
def test_frames_arrive_as_they_were_sent_count(
    echoing: Listener, frames: list[tuple[bytes, list[bytes]]]
) -> None:
    with contextlib.closing(connected(echoing)) as link:
        for header, parts in frames:
            link.send(header, *parts)
            found, body = link.receive(wait_s=5)
            assert (found, bytes(body)) == (header, b"".join(parts))


def test_a_body_goes_where_its_header_says(echoing: Listener) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8)
    place = np.empty_like(data)
    with contextlib.closing(connected(echoing)) as link:
        sender = threading.Thread(target=link.send, args=(b"big", *np.split(data, 3_000)))
        sender.start()
        header, body = link.receive(lambda header, size: place.data[:size], wait_s=5)
        sender.join()
    assert header == b"big"
    np.testing.assert_array_equal(place, data)
    assert np.shares_memory(np.asarray(body), place)


def test_who_has_another_token_is_told(echoing: Listener) -> None:
    with pytest.raises(LinkRefused, match="another token"):
        connected(echoing, token=b"u" * 32)


def test_another_service_is_refused(echoing: Listener) -> None:
    with pytest.raises(LinkError, match="no cache of this version listens"):
        connected(echoing, purpose="cache")


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = join_address("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(LinkError, match="does not answer"):
        Link.connect(address, TOKEN, "echo", timeout_s=1)


def test_somebody_who_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = join_address("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(LinkError, match="did not complete the connection"):
            Link.connect(address, TOKEN, "echo", timeout_s=0.1)


def test_a_service_without_the_token_learns_nothing() -> None:
    def impostor(listening: socket.socket) -> None:
        with listening.accept()[0] as whom:
            whom.recv(1_000)
            whom.sendall(b"stoker\x00\x02" + bytes(65))
            heard.append(whom.recv(1_000))

    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=impostor, args=(listening,))
        thread.start()
        address = join_address("127.0.0.1", listening.getsockname()[1])
        with pytest.raises(LinkError, match="another token"):
            Link.connect(address, TOKEN, "echo", timeout_s=5)
        thread.join()
    assert heard == [b""]


def test_silence_before_a_frame_leaves_the_connection(echoing: Listener) -> None:
    with contextlib.closing(connected(echoing)) as link:
        with pytest.raises(TimeoutError, match=r"sent nothing for 0\.01 s"):
            link.receive(wait_s=0.01)
        link.send(b"still there")
        assert link.receive(wait_s=5)[0] == b"still there"


def test_who_says_nothing_keeps_nobody_out(
    echoing: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are; those who came first are closed for it."""
    monkeypatch.setattr("stoker.transport.listener._AUTHENTICATE_S", 3600.0)
    with contextlib.ExitStack() as ends:
        silent = [ends.enter_context(raw(echoing)) for _ in range(100)]
        with contextlib.closing(connected(echoing)) as link:
            link.send(b"fine")
            assert link.receive(wait_s=5)[0] == b"fine"
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
    waiting.join(10)
    assert ended


def test_a_listener_ends_its_connections() -> None:
    listener = Listener("127.0.0.1", 0, TOKEN, "echo", echo)
    link = connected(listener)
    link.send(b"one")
    assert link.receive(wait_s=5)[0] == b"one"
    listener.close()
    with pytest.raises((EOFError, LinkError)):
        link.receive(wait_s=5)
    link.close()
    with pytest.raises(LinkError):
        connected(listener)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificates(tmp_path_factory.mktemp("other-tls"))


@pytest.fixture
def encrypting(tls: Tls) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, TOKEN, "echo", echo, tls=tls)
    yield listener
    listener.close()


def test_encrypted(encrypting: Listener, tls: Tls) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8)
    link = Link.connect(encrypting.address, TOKEN, "echo", timeout_s=5, tls=tls)
    for _ in range(3):
        sender = threading.Thread(target=link.send, args=(b"secret", data[:7], data))
        sender.start()
        _, body = link.receive(wait_s=5)
        sender.join()
        np.testing.assert_array_equal(np.asarray(body), np.concatenate([data[:7], data]))
    with pytest.raises(TimeoutError, match="sent nothing"):
        link.receive(wait_s=0.01)
    with pytest.raises(LinkError, match="another token"):
        Link.connect(encrypting.address, b"u" * 32, "echo", timeout_s=5, tls=tls)


def test_what_is_encrypted_cannot_be_read_on_its_way(encrypting: Listener, tls: Tls) -> None:
    seen = bytearray()
    with overheard(encrypting.address, seen) as address:
        link = Link.connect(address, TOKEN, "echo", timeout_s=5, tls=tls)
        link.send(b"the header", b"the body")
        assert link.receive(wait_s=5)[0] == b"the header"
        link.close()
    assert len(seen) > 1_000
    assert not any(word in seen for word in (b"the header", b"the body", b"STKF"))


def test_both_ends_of_an_encrypted_connection_may_be_busy(encrypting: Listener, tls: Tls) -> None:
    """One thread sends all the time, another receives: neither waits for the other."""
    link = Link.connect(encrypting.address, TOKEN, "echo", timeout_s=30, tls=tls)
    sent = [bytes([number % 256]) * (number * 37 % 5_000) for number in range(1_500)]

    def send() -> None:
        for number, body in enumerate(sent):
            link.send(b"%d" % number, body)

    sender = threading.Thread(target=send)
    sender.start()
    for number, body in enumerate(sent):
        assert link.receive(wait_s=30) == (b"%d" % number, body)
    sender.join()


def test_who_does_not_encrypt_is_told_by_who_does(encrypting: Listener) -> None:
    with pytest.raises(LinkRefused, match="encrypts connections with"):
        connected(encrypting)


def test_who_encrypts_is_told_by_who_does_not(echoing: Listener, tls: Tls) -> None:
    with pytest.raises(LinkRefused, match="does not encrypt connections"):
        Link.connect(echoing.address, TOKEN, "echo", timeout_s=5, tls=tls)


def test_certificates_of_another_authority(tls: Tls, other_tls: Tls) -> None:
    believer = Tls(other_tls.certificate, other_tls.key, tls.authority)
    for theirs, message in (
        (other_tls, "this host's authority did not sign its certificate"),
        (believer, "it rejected this host's certificate"),
    ):
        with contextlib.closing(Listener("127.0.0.1", 0, TOKEN, "echo", echo, tls=tls)) as here:
            with pytest.raises(LinkRefused, match=message):
                Link.connect(here.address, TOKEN, "echo", timeout_s=5, tls=theirs)
            link = Link.connect(here.address, TOKEN, "echo", timeout_s=5, tls=tls)
            link.send(b"fine")
            assert link.receive(wait_s=5)[0] == b"fine"


def test_files_that_cannot_be_used_are_named(tls: Tls, other_tls: Tls, tmp_path: Path) -> None:
    for wrong in (
        Tls(tls.certificate, other_tls.key, tls.authority),
        Tls(tmp_path / "none", tls.key, tls.authority),
    ):
        with pytest.raises(TokenError, match=f"connections with {wrong.certificate}"):
            Listener("127.0.0.1", 0, TOKEN, "echo", echo, tls=wrong)


def test_the_files_of_a_host(tls: Tls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("STOKER_TLS_FOLDER", raising=False)
    assert host_tls() is None
    rays = {"CERT": tls.certificate, "KEY": tls.key}
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tls.authority))
    for name, path in rays.items():
        monkeypatch.setenv(f"RAY_TLS_SERVER_{name}", str(path))
    assert host_tls() == tls
    shutil.copytree(tls.key.parent, tmp_path / ".config" / "stoker" / "tls")
    found = host_tls()
    assert found is not None
    assert found.key == tmp_path / ".config" / "stoker" / "tls" / "key.pem"
    monkeypatch.setenv("STOKER_TLS_FOLDER", str(tls.key.parent))
    assert host_tls() == tls
    monkeypatch.setenv("STOKER_TLS_FOLDER", str(tmp_path / "none"))
    with pytest.raises(TokenError, match=r"STOKER_TLS_FOLDER names .*no such folder"):
        host_tls()
    monkeypatch.delenv("STOKER_TLS_FOLDER")
    found.key.chmod(0o640)
    with pytest.raises(TokenError, match=r"other users can read .*chmod 600"):
        host_tls()


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
        link.send(b"mine")
        assert link.receive(wait_s=5)[0] == b"mine"


def raw(listener: Listener) -> socket.socket:
    host, port = split_address(listener.address)
    return socket.create_connection((host, port), 5)


@given(st.binary(max_size=200))
def test_strangers_harm_nobody(echoing: Listener, sent: bytes) -> None:
    # It hangs up as soon as it knows.
    with raw(echoing) as stranger, contextlib.suppress(OSError):
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        assert not stranger.recv(1_000)[8 + 64 :]  # a challenge at most
    with contextlib.closing(connected(echoing)) as link:
        link.send(b"fine")
        assert link.receive(wait_s=5)[0] == b"fine"


@given(st.binary(max_size=200), st.booleans())
def test_who_connects_to_a_stranger_is_told(said: bytes, is_like_ours: bool) -> None:
    """Whatever that one says, and however it begins."""

    def stranger() -> None:
        with listening.accept()[0] as whom, contextlib.suppress(OSError):
            whom.sendall(b"stoker\x00\x02" * is_like_ours + said)
            whom.shutdown(socket.SHUT_WR)
            while whom.recv(1_000):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=stranger)
        thread.start()
        address = join_address("127.0.0.1", listening.getsockname()[1])
        with pytest.raises(LinkError):
            Link.connect(address, TOKEN, "echo", timeout_s=20)
        thread.join()


@given(st.data())
def test_damaged_frames_end_the_connection(echoing: Listener, data: st.DataObject) -> None:
    """Whatever is changed in the head or the header is noticed, and costs no more than this."""
    header = data.draw(st.binary(min_size=1, max_size=50))
    link = connected(echoing)
    frame = bytearray(link._next_header(header, 3))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(OSError):  # it may be gone before that
        link._socket.sendall(bytes(frame) + b"abc")
        link._socket.shutdown(socket.SHUT_WR)
    with pytest.raises((EOFError, LinkError)):
        link.receive(wait_s=5)


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
def test_what_could_be_waited_for_is_no_token_file(tmp_path: Path, tls: Tls) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, Path("/dev/null"), tmp_path):
        with pytest.raises(TokenError, match=f"{path}"):
            read_token(path)
    for files in (
        Tls(pipe, tls.key, tls.authority),
        Tls(tls.certificate, pipe, tls.authority),
        Tls(tls.certificate, tls.key, pipe),
    ):
        with pytest.raises(TokenError, match=f"{pipe} is not a regular file"):
            Listener("127.0.0.1", 0, TOKEN, "echo", echo, tls=files)
