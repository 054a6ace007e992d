"""Files that become others while they are read, here or behind URLs: no parts of two are mixed.

Local ones keep their size and time of modification.
"""

from __future__ import annotations

import http.server
import io
import os
import pickle
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from servers import serving


def tar(letter: bytes) -> bytes:
    """Make a shard whose files have other places for another letter, within one size."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for number in range(4):
            name = f"{number if letter == b'a' else 3 - number}.txt"
            member = tarfile.TarInfo(name)
            member.size = 600
            archive.addfile(member, io.BytesIO(letter * 599 + str(number).encode()))
    return data.getvalue()


def shard(path: Path, letter: bytes) -> None:
    path.write_bytes(tar(letter))


def zipped(path: Path, letter: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(4):
            archive.writestr(f"{number}.txt", letter * 600)


def tokens(letter: bytes) -> bytes:
    data = io.BytesIO()
    np.save(data, np.full(4000, letter[0], np.int32))
    return data.getvalue()


def parquet(path: Path, letter: bytes) -> None:
    import pyarrow
    import pyarrow.parquet as pq

    pq.write_table(pyarrow.table({"x": np.full(64, letter[0])}), path)


KINDS: dict[str, tuple[str, Callable[[Path, bytes], object], Callable[[Path], Any]]] = {
    "tar": ("x.tar", shard, lambda path: stoker.from_tar(str(path), seed=0)),
    "zip": ("x.zip", zipped, lambda path: stoker.from_tar(str(path), seed=0)),
    "tokens": (
        "x.npy",
        lambda path, letter: path.write_bytes(tokens(letter)),
        lambda path: stoker.from_tokens(str(path), 8, seed=0),
    ),
    "parquet": ("x.parquet", parquet, lambda path: stoker.from_parquet(str(path), seed=0)),
}


def replaced(path: Path, write: Callable[[Path, bytes], object], *, in_place: bool) -> None:
    """Put other content there as ``rsync -t`` and ``cp -p`` do: size and time are as before."""
    before = path.stat()
    new = path.with_suffix(".new" + path.suffix)
    write(new, b"b")
    assert new.stat().st_size == before.st_size
    os.utime(new, ns=(before.st_mtime_ns, before.st_mtime_ns))
    if in_place:
        path.write_bytes(new.read_bytes())
        shutil.copystat(new, path)
        new.unlink()
    else:
        os.replace(new, path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_built_before_says_so_and_what_is_built_anew_reads_the_new_content(
    kind: str, in_place: bool, tmp_path: Path
) -> None:
    name, write, build = KINDS[kind]
    path, other = tmp_path / name, tmp_path / f"other-{name}"
    write(path, b"a")
    first = [str(example) for example in build(path)]
    train = build(path).workers(0)
    replaced(path, write, in_place=in_place)
    with pytest.raises(stoker.StageError, match="has changed"):
        list(train)
    write(other, b"b")
    expected = [str(example) for example in build(other)]
    assert [str(example) for example in build(path)] == expected != first


def test_what_is_open_while_it_is_replaced_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    shard(path, b"a")
    train = stoker.from_tar(str(path), seed=0).workers(0)
    with iter(train) as examples:
        next(examples)
        replaced(path, shard, in_place=False)
        assert all(b"a" in example["txt"] for example in examples)


# -- behind URLs


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
