"""Servers that do not answer as they should: nothing is taken that is not whole."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import socketserver
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import stoker
from servers import serving
from stoker.sources import files
from stoker.sources.remote import failures
from stoker.sources.remote.failures import StatusError, retry

BODY = bytes(range(256)) * 40
LONG_S = 1000.0  # never waited for


class Script(socketserver.ThreadingTCPServer):
    """Sends what it was told to, in turn, a connection for each request; the last one again."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, *answers: bytes | Callable[[socket.socket], None]) -> None:
        self.answers = answers
        self.asked: Counter[str] = Counter()
        self.heads: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/a.bin"


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            received = self.request.recv(65536)
            if not received:
                return
            head += received
        server.heads.append(head.decode())
        answers = server.answers
        answer = answers[min(len(server.heads), len(answers)) - 1]
        with contextlib.suppress(OSError):
            if callable(answer):
                answer(self.request)
            else:
                self.request.sendall(answer)


def answering(*answers: Any) -> Any:
    return serving(Script(*answers))


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = -1) -> bytes:
    """Write an answer; ``length`` -1 is the right one, None says none."""
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length < 0 else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(body: bytes, *, end: bytes = b"0\r\n\r\n") -> bytes:
    head = answer(b"", "Transfer-Encoding: chunked", length=None)
    return head + b"%x\r\n" % len(body) + body + b"\r\n" + end


def read(url: str, timeout_s: float, **how: Any) -> bytes:
    ((_, data),) = stoker.from_files([url], timeout_s=timeout_s, **how)
    return data


GOOD = answer(BODY)
GZIP = "Content-Encoding: gzip"
cut = gzip.compress(BODY)[:-20]

PASSES = {
    "a body cut short": answer(BODY[:-1], length=len(BODY)),
    "chunks cut short": chunked(BODY, end=b""),
    "a chunk cut short": chunked(BODY)[:-1000],
    "a chunk that is shorter than it says": chunked(BODY).replace(b"2800\r\n", b"2900\r\n"),
    "no status line": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "a status that is none": answer(BODY, status="999999 Yes"),
    "garbage": bytes(range(256)),
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "a length that is none": answer(BODY, "Content-Length: many", length=None),
    "two lengths": answer(BODY, "Content-Length: 5"),
    "a header without a name": answer(BODY, ": x"),
    "a head that is too long": answer(BODY, "X: " + "y" * 100_000),
    "too many headers": answer(BODY, *[f"X-{n}: y" for n in range(10_000)]),
}


@pytest.mark.parametrize("what", PASSES)
def test_what_is_not_whole_is_tried_again(what: str) -> None:
    with answering(PASSES[what], GOOD) as server:
        assert read(server.url, LONG_S) == BODY
        assert len(server.heads) >= 2
    with answering(PASSES[what]) as server:
        with pytest.raises(stoker.StageError) as caught:
            read(server.url, 0.15)
        cause = caught.value.__cause__
        assert isinstance(cause, stoker.RemoteError)
        assert cause.attempts > 1
        assert "\n" not in str(cause)


STAYS = {
    "gzip": (answer(gzip.compress(BODY), GZIP), r"encoded \(gzip\)"),
    "gzip cut short": (answer(cut, GZIP), "encoded"),
    "deflate": (answer(zlib.compress(BODY), "Content-Encoding: deflate"), "encoded"),
    "gzip in pieces": (answer(BODY, "Content-Encoding: gzip, aws-chunked"), "encoded"),
    "br": (answer(b"x", "Content-Encoding: br"), "encoded"),
    "part of it": (
        answer(BODY[:9], "Content-Range: bytes 5-13/100", status="206 Partial Content"),
        "HTTP 206",
    ),
    "no length": (answer(BODY, length=None), "does not state its length"),
    "a redirect to nowhere": (answer(b"", "Location: ftp://x/y", status="302 Found"), "ftp://x/y"),
}


@pytest.mark.parametrize("what", STAYS)
def test_what_cannot_be_used_is_refused_at_once(what: str) -> None:
    said, message = STAYS[what]
    with answering(said) as server:
        with pytest.raises(stoker.StageError, match=message) as caught:
            read(server.url, LONG_S)
        assert isinstance(caught.value.__cause__, stoker.RemoteError)
        assert len(server.heads) == 1


def test_redirects_in_a_loop_end() -> None:
    with answering(answer(b"", "Location: /a.bin", status="302 Found")) as server:
        with pytest.raises(stoker.StageError, match="redirects"):
            read(server.url, LONG_S)
        assert len(server.heads) < 30


@pytest.mark.parametrize("called", ["identity", "utf-8", "aws-chunked", "Identity, aws-chunked"])
def test_plain_bytes_are_asked_for_and_may_have_these_names(called: str) -> None:
    options = {"headers": {"Authorization": "Bearer x"}, "client_kwargs": {"trust_env": False}}
    with answering(answer(BODY, f"Content-Encoding: {called}")) as server:
        assert read(server.url, LONG_S, storage_options=options) == BODY
        head = server.heads[0].lower()
        assert "accept-encoding: identity" in head
        assert "authorization: bearer x" in head
        assert "\r\nrange:" not in head


def test_a_body_that_is_longer_than_promised_is_refused_or_ends_where_it_was_promised() -> None:
    with answering(answer(BODY, length=100)) as server:
        try:
            found = read(server.url, 0.1)
        except stoker.StageError:
            return  # what came behind it was seen in time
        assert found == BODY[:100]


def test_a_whole_chunked_body() -> None:
    with answering(chunked(BODY)) as server:
        assert read(server.url, LONG_S) == BODY


def test_a_bomb_is_not_inflated() -> None:
    bomb = answer(gzip.compress(bytes(1 << 27)), GZIP)
    with answering(bomb) as server:
        tracemalloc.start()
        try:
            with pytest.raises(stoker.StageError, match="encoded"):
                read(server.url, LONG_S)
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(answer(b"", "Transfer-Encoding: chunked", length=None))
        while True:
            connection.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    monkeypatch.setattr(files, "_LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(files.resources, "usable_memory_bytes", lambda: 1 << 22)
    with answering(endless) as server, pytest.raises(stoker.StageError, match="into memory"):
        read(server.url, LONG_S)
    with answering(answer(b"x", length=1 << 50)) as server:
        with pytest.raises(stoker.StageError, match="into memory"):
            read(server.url, LONG_S)
        assert len(server.heads) == 1


def test_headers_that_never_end_are_given_up() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            connection.sendall(b"X-More: and more\r\n" * 1000)

    with answering(endless) as server, pytest.raises(stoker.StageError):
        read(server.url, 0.2)


# -- how long is waited, on a clock of the test's own


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []
        patch.setattr(failures.time, "monotonic", lambda: self.now_s)
        patch.setattr(failures.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def tried(failures: list[Any], timeout_s: float = 60.0) -> str:
    """Run an attempt that fails so often before it works."""

    async def attempt() -> str:
        if failures:
            raise failures.pop(0)
        return "read"

    return asyncio.run(retry(attempt, "http://x/y", timeout_s))


def test_a_server_that_says_how_long_is_left_alone_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert tried([StatusError(429, "Too Many", "7"), StatusError(503, None)]) == "read"
    assert clock.slept_s[0] == 7
    assert clock.slept_s[1] < 1  # it did not say, the second time


@pytest.mark.parametrize("said", [None, "", "Fri, 20 Nov 2026 10:00:00 GMT", "-3", "soon"])
def test_what_is_no_number_of_seconds_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    clock = Clock(monkeypatch)
    assert tried([StatusError(503, None, said)]) == "read"
    assert 0 < clock.slept_s[0] <= 0.1


def test_no_server_is_waited_for_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(stoker.RemoteError, match=r"HTTP 503 after 2 attempts in 5 s"):
        tried([StatusError(503, None, "3600")] * 3, timeout_s=5.0)
    assert clock.slept_s == [5.0]
