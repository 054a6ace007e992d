"""The demonstration's HTTP server: what it serves, its limits, its faults, its end."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from experiments.server import Server, serving
from scripts import Watch, script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.jpg").write_bytes(b"a cat" * 100)
    (tmp_path / "cat" / "b.jpg").write_bytes(b"")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


class Client:
    """One connection that stays open."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(server.url.partition("://")[2], timeout=300)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *args: object) -> None:
        self._connection.close()

    def get(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    @property
    def port(self) -> int:
        port: int = self._connection.sock.getsockname()[1]
        return port


def get(server: Server, path: str) -> tuple[int, bytes]:
    with Client(server) as client:
        return client.get(path)


# -- what it serves


def test_files_are_served_on_one_connection(server: Server) -> None:
    with Client(server) as client:
        assert client.get("/cat/a.jpg") == (200, b"a cat" * 100)
        port = client.port
        assert client.get("/cat/b.jpg") == (200, b"")
        assert client.get("/cat/none.jpg") == (404, b"")
        assert client.get("/cat/a.jpg?version=1")[0] == 200
        assert client.port == port


def test_nothing_outside_the_folder_is_served(server: Server, folder: Path) -> None:
    (folder.parent / "secret").write_bytes(b"secret")
    for path in ("/../secret", "/%2e%2e/secret", "/cat/../../secret", "//../secret", "/\0"):
        assert get(server, quote(path, safe="/%"))[0] == 404


def test_names_are_quoted_and_folders_are_no_files(server: Server, folder: Path) -> None:
    for name in (b"a b", b"#?&%41%", b"<i>'\"", b"new\nline", "日本".encode(), b"caf\xe9", b"a:b"):
        (folder / os.fsdecode(name)).write_bytes(name)
        assert get(server, "/" + quote(name)) == (200, name)
    for path in ("/", "/cat", "/cat/"):
        assert get(server, path) == (404, b"")


# -- its life


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(folder: Path, how: signal.Signals) -> None:
    body = f"""
    import psutil
    from experiments.server import serving
    with serving({str(folder)!r}):
        say(str(psutil.Process().children()[0].pid))
        if os.fork() == 0:  # a child that lives on keeps the pipes open
            time.sleep(50)
        say("forked")
        time.sleep(50)
    """
    with script(folder, body) as running, Watch([int(running.line())]) as watch:
        assert running.line() == "forked"
        os.kill(running.pid, how)
        assert watch.gone()
