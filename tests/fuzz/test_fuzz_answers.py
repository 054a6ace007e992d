"""What web servers answer: files and parts of shards, with bytes that were changed."""

from __future__ import annotations

import contextlib
import io
import re
import socketserver
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import fuzz, mutated

import stoker
from servers import serving

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*what comes behind is left out"),
]

BODY = bytes(range(256)) * 4
_RANGE = re.compile(rb"[Rr]ange: bytes=(\d+)-(\d+)")


def tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(2):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = len(BODY)
            archive.addfile(member, io.BytesIO(BODY))
    return stream.getvalue()


FILES = {
    b"/a.bin": (b"application/octet-stream", BODY),
    b"/a.tar": (b"application/x-tar", tar()),
}


def answer(head: bytes) -> bytes:
    """Answer a request as it should be."""
    path = head.split(b" ")[1]
    kind, content = FILES.get(path, (b"image/jpeg", BODY))
    status, more, span = b"200 OK", b"", _RANGE.search(head)
    if span is not None:
        first, last = int(span[1]), int(span[2])
        part = content[first : last + 1]
        told = b"bytes %d-%d/%d" % (first, first + len(part) - 1, len(content))
        status, more, content = b"206 Partial Content", b"Content-Range: " + told + b"\r\n", part
    return (
        b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nETag: \"1\"\r\nContent-Type: " + kind
        + b"\r\n" + more + b"Content-Length: %d\r\n\r\n" % len(content) + content
    )  # fmt: skip


class Server(socketserver.ThreadingTCPServer):
    """Answers as it should, but for one of its answers, which ``tampered`` is given.

    Attributes:
        tampers: which of the next answers is changed, from 0 on.
    """

    allow_reuse_address = daemon_threads = True
    request_queue_size = 100

    def __init__(self) -> None:
        self.tampers, self.rng = 0, np.random.default_rng(0)
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, head: bytes) -> bytes:
        with self.lock:
            self.tampers -= 1
            return mutated(answer(head), self.rng) if self.tampers == -1 else answer(head)


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        head = b""
        with contextlib.suppress(OSError):
            while not head.endswith(b"\r\n\r\n"):
                received = self.request.recv(65536)
                if not received:
                    return
                head += received
            self.request.sendall(server.answer(head))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(Server()) as made:
        yield made


@pytest.mark.parametrize("kind", ["file", "shard"])
def test_answers(server: Server, tmp_path: Path, kind: str) -> None:
    def build() -> Any:
        if kind == "file":
            return stoker.from_files([f"{server.url}/a.bin"], seed=0, timeout_s=0)
        return stoker.from_tar(f"{server.url}/a.tar", seed=0, timeout_s=0)

    def number_of(data: bytes, rng: np.random.Generator) -> bytes:
        return rng.bytes(8)  # what tampers with which answer follows from this

    def read(data: bytes) -> None:
        for kept in tmp_path.rglob("*"):  # or the index of the shard is not read again
            if kept.is_file():
                kept.unlink()
        server.rng = np.random.default_rng(list(data))
        server.tampers = int(server.rng.integers(1 if kind == "file" else 4))
        list(build().workers(0))

    refusals = (stoker.StageError, stoker.RemoteError, ValueError)
    fuzz(f"answer {kind}", [b"-"], read, refusals, says=server.url, mutate=number_of, share=3)
