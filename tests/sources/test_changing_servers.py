"""Files behind URLs that become others while they are read: no parts of two are mixed."""

from __future__ import annotations

import http.server
import io
import pickle
import re
import tarfile
from typing import Any

import numpy as np
import pytest

import stoker
from servers import serving


def tar(letter: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 600
            archive.addfile(member, io.BytesIO(letter * 600))
    return data.getvalue()


def tokens(letter: bytes) -> bytes:
    data = io.BytesIO()
    np.save(data, np.full(4000, letter[0], np.int32))
    return data.getvalue()


class Changing(http.server.ThreadingHTTPServer):
    """Serves one file by ranges; another one of its size after so many answers."""

    daemon_threads = True

    def __init__(self, name: str, make: Any, tell: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies, self.tell = [make(b"a"), make(b"b")], tell
        self.answers, self.change_at, self.mirrors = 0, 1 << 30, 1
        self.url = f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        new = int(server.answers >= server.change_at)
        server.answers += 1
        body = server.bodies[new]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        assert found is not None
        start, stop = int(found[1]), min(int(found[2]) + 1, len(body))
        self.send_response(206)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
        if server.tell:
            tag = new + server.answers % server.mirrors
            date = f"Mon, 0{tag + 1} Jan 2024 00:00:00 GMT"
            self.send_header(server.tell, f'"{tag}"' if server.tell == "ETag" else date)
        self.end_headers()
        self.wfile.write(body[start:stop])

    def log_message(self, *args: Any) -> None:
        pass


def changing(kind: str, tell: str) -> Any:
    name, make = {"tar": ("x.tar", tar), "tokens": ("x.npy", tokens)}[kind]
    return serving(Changing(name, make, tell))


def build(server: Changing) -> stoker.Pipeline:
    if server.url.endswith(".tar"):
        return stoker.from_tar(server.url, seed=0, timeout_s=0)
    return stoker.from_tokens(server.url, 100, seed=0, timeout_s=0)


@pytest.mark.parametrize("tell", ["ETag", "Last-Modified"])
@pytest.mark.parametrize("kind", ["tar", "tokens"])
def test_a_file_that_changes_behind_its_index_is_an_error(kind: str, tell: str) -> None:
    with changing(kind, tell) as server:
        assert len(list(build(server))) > 1
        train = build(server)
        server.change_at = server.answers
        with pytest.raises(stoker.StageError, match="Last-Modified has changed since"):
            list(train)
        assert len(list(build(server))) > 1  # built anew


@pytest.mark.parametrize("kind", ["tar", "tokens"])
def test_a_file_that_changes_within_its_index_is_an_error(kind: str) -> None:
    with changing(kind, "ETag") as server:
        server.change_at = 1
        with pytest.raises(stoker.StokerError, match="Last-Modified has changed since"):
            build(server)


@pytest.mark.parametrize("tell", ["ETag", "Last-Modified"])
@pytest.mark.parametrize("kind", ["tar", "tokens"])
def test_mirrors_that_tell_other_versions_of_the_same_bytes(kind: str, tell: str) -> None:
    with changing(kind, tell) as server:
        whole = [pickle.dumps(example) for example in build(server)]
        server.mirrors = 3
        assert [pickle.dumps(example) for example in build(server)] == whole


def test_a_server_that_tells_nothing_is_believed() -> None:
    with changing("tar", "") as server:
        assert len(list(build(server))) == 4
