"""Tar shards behind URLs, read by ranges."""

from __future__ import annotations

import http.server
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from shards import pack, pairs

import stoker
from servers import serving
from stoker.schedule.orders.blocks import WINDOW
from stoker.testing import check_resume
from strategies import stream

COUNT = 12
MANY = 240


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Sends files of ``folder``, and parts of them where it ``can``; counts the requests."""

    folder = ""
    can = True
    counted = 0

    def do_GET(self) -> None:
        type(self).counted += 1
        file = Path(self.folder, os.path.basename(self.path.partition("?")[0]))
        if not file.is_file():
            return self.send_error(404)
        data = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.can:
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
            self.send_response(206 if start < end else 416)
            part = f"{start}-{end - 1}" if start < end else "*"
            self.send_header("Content-Range", f"bytes {part}/{len(data)}")
            data = data[start:end]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that have gone."""


@pytest.fixture
def handler(tmp_path: Path) -> type[Ranges]:
    class Handler(Ranges):
        folder = str(tmp_path / "site")

    (tmp_path / "site").mkdir()
    for n in range(2):
        pack(tmp_path / "site" / f"s-{n}.tar", pairs(n * COUNT, COUNT))
    return Handler


@pytest.fixture
def url(handler: type[Ranges], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(Server(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}/s-{{0..1}}.tar"


def test_it_is_the_same_as_local_shards(url: str, tmp_path: Path, handler: type[Ranges]) -> None:
    def build(shards: Any = url, workers: int = 2) -> stoker.Pipeline:
        source = stoker.from_tar(shards, ["cls", "jpg"], seed=1, requests=4)
        return source.shuffle().batch(5).workers(workers)

    local = stream(build(tmp_path / "site" / "s-{0..1}.tar"))
    assert stream(build()) == stream(build(workers=0)) == local
    check_resume(build, every=4)
    before = handler.counted
    assert len(list(build())) == 5
    # Few MiB are read as they are; of each shard, whose index was kept, its size and version.
    assert handler.counted - before == 2 + 2


@pytest.fixture
def many(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Shards of some 20 runs each, of some five examples."""
    monkeypatch.setattr("stoker.sources.shards.shard_source.RUN_BYTES", 1 << 13)
    for n in range(2):
        files = {f"{n}{i:04}.bin": bytes([i % 256]) * 700 for i in range(MANY // 2)}
        pack(tmp_path / "site" / f"s-{n}.tar", files)
    return url


def mixed_by_runs(url: str, workers: int = 2) -> Any:
    return stoker.from_tar(url, seed=3).shuffle().batch(16).workers(workers)


def blocks_of(train: Any) -> int:
    found = re.search(r"shuffle\((\d+) blocks\)", str(train))
    assert found is not None
    return int(found[1])


def test_neighbours_are_read_together(many: str, tmp_path: Path, handler: type[Ranges]) -> None:
    train = mixed_by_runs(many)
    blocks = blocks_of(train)
    assert 2 * WINDOW < blocks < MANY / 4
    assert "of runs up to 64.0 MiB are kept in memory" in str(train)
    local = stoker.from_tar(tmp_path / "site" / "s-{0..1}.tar")
    data = {each["__key__"]: each["bin"] for each in local}

    def requests(pipeline: Any) -> int:
        before = handler.counted
        found = {
            key: file
            for batch in pipeline
            for key, file in zip(batch["__key__"], batch["bin"], strict=True)
        }
        assert found == data
        return handler.counted - before

    assert requests(train) == requests(train) == blocks  # each once an epoch
    assert requests(stoker.from_tar(many).batch(16)) == blocks
    whole = stoker.from_tar(many, seed=3).shuffle(block=False).batch(16)
    assert "blocks" not in str(whole)
    assert requests(whole) == MANY


@pytest.mark.full
def test_a_shuffle_by_runs_resumes_anywhere(many: str) -> None:
    assert stream(mixed_by_runs(many, 0)) == stream(mixed_by_runs(many))
    check_resume(lambda: mixed_by_runs(many), every=5)


def test_ranks_and_mixtures_read_together_too(many: str, handler: type[Ranges]) -> None:
    found: list[str] = []
    before = handler.counted
    for rank in range(2):
        train = stoker.from_tar(many, seed=3).shuffle().shard(rank=rank, world_size=2)
        found += [example["__key__"] for example in train]
    assert len(set(found)) == len(found) == MANY
    assert handler.counted - before < MANY / 2  # each reads runs of its own, but for some
    tar: Any = stoker.from_tar(many).shuffle()
    numbers: Any = stoker.from_arrays(np.arange(MANY)).shuffle()
    before = handler.counted
    mixture: Any = stoker.mix([tar, numbers], seed=0)
    assert len(list(mixture)) == 2 * MANY
    assert handler.counted - before < MANY / 4


def test_runs_that_are_no_longer_wanted_are_dropped(
    many: str, handler: type[Ranges], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = mixed_by_runs(many, 1)
    blocks = blocks_of(train)
    for kept_runs in (2 * WINDOW, 0):
        monkeypatch.setattr("stoker.sources.shards.shard_source.KEPT_BYTES", kept_runs << 13)
        before = handler.counted
        assert sum(len(batch["bin"]) for batch in train) == MANY
        # Those that begin an epoch and end it are read twice; without room all are, and more.
        assert (handler.counted - before <= blocks + WINDOW) == (kept_runs > 0)


def test_large_examples_are_read_one_by_one(many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.sources.shards.shard_source.RUN_BYTES", 1 << 10)
    assert "blocks" not in str(stoker.from_tar(many).shuffle())
    assert blocks_of(stoker.from_tar(many).shuffle(block=True)) == MANY


def test_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    shard = pack(tmp_path / "a.tar", pairs(0, COUNT))
    try:
        memory.pipe("/shards/a.tar", Path(shard).read_bytes())
        found = list(stoker.from_tar("memory://shards/*.tar"))
        assert found == list(stoker.from_tar(shard))
    finally:
        memory.rm("/shards", recursive=True)


def test_a_shard_that_changed_is_named(url: str, tmp_path: Path) -> None:
    train = stoker.from_tar(url)
    pack(tmp_path / "site" / "s-0.tar", {"000000.cls": b"x", **pairs(100, COUNT)})
    with pytest.raises(stoker.StageError, match=r"http.*s-0\.tar: its ETag or Last-Modified"):
        list(train)
    pack(tmp_path / "site" / "s-0.tar", pairs(0, 1))
    os.truncate(tmp_path / "site" / "s-0.tar", 1024)
    with pytest.raises(stoker.StageError, match=r"s-0\.tar"):
        list(train)


def test_a_truncated_shard(url: str, tmp_path: Path) -> None:
    shard = pack(tmp_path / "site" / "s-1.tar", {f"{n}.bin": bytes(1000) for n in range(6)})
    os.truncate(shard, 512 + 3 * 1536 + 700)
    with pytest.raises(ValueError, match=r"s-1\.tar is truncated.*example '3' is not all there"):
        stoker.from_tar(url)
    with pytest.warns(UserWarning, match="left out"):
        train = stoker.from_tar(url, max_errors=1)
    assert len(list(train)) == COUNT + 3


def test_a_server_without_ranges_is_refused(url: str, handler: type[Ranges]) -> None:
    handler.can = False
    with pytest.raises(stoker.RemoteError, match=r"whole files only.*copy the file to a local"):
        stoker.from_tar(url)


def test_what_is_not_there_or_no_tar(url: str, tmp_path: Path) -> None:
    pack(tmp_path / "site" / "s-1.tar", {})
    (tmp_path / "site" / "s-0.tar").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"s-0\.tar is truncated or damaged: File is not a zip"):
        stoker.from_tar(url)
    with pytest.raises(FileNotFoundError, match=r"nowhere-0\.tar"):
        stoker.from_tar(url.replace("s-", "nowhere-"))
