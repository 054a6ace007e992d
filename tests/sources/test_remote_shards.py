"""Tar shards behind URLs, read by ranges."""

from __future__ import annotations

import http.server
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shards import pack, pairs

import stoker
from stoker.block_order import WINDOW
from stoker.testing import check_resume
from strategies import stream

pytest.importorskip("aiohttp")
fsspec = pytest.importorskip("fsspec")

COUNT = 12


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Sends files of ``folder``, and parts of them where it ``can``; counts the requests."""

    folder = ""
    can = True
    counted = 0

    def do_GET(self) -> None:
        type(self).counted += 1
        file = Path(self.folder, os.path.basename(self.path))
        if not file.exists():
            return self.send_error(404)
        data = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.can:
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
            self.send_response(206 if start < end else 416)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
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
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/s-{{0..1}}.tar"
        finally:
            server.shutdown()
            thread.join()


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
    """Shards of 40 runs each, of some six examples."""
    monkeypatch.setattr("stoker.sources.remote.shard_runs.RUN_BYTES", 1 << 13)
    for n in range(2):
        files = {f"{n}{i:04}.bin": bytes([i % 256]) * 700 for i in range(240)}
        pack(tmp_path / "site" / f"s-{n}.tar", files)
    return url


def test_neighbours_are_read_together(many: str, tmp_path: Path, handler: type[Ranges]) -> None:
    def build(workers: int = 2) -> stoker.Pipeline:
        return stoker.from_tar(many, seed=3).shuffle().batch(16).workers(workers)

    train = build()
    blocks = int(re.search(r"shuffle\((\d+) blocks\)", str(train))[1])  # type: ignore[index]
    assert WINDOW < blocks < 480 / 4
    assert "of runs up to 64.0 MiB are kept in memory" in str(train)

    def requests(pipeline: stoker.Pipeline) -> int:
        before = handler.counted
        keys = [key for batch in pipeline for key in batch["__key__"]]
        assert len(set(keys)) == len(keys) == len(pipeline) * 16
        return handler.counted - before

    for _ in range(2):
        assert requests(train) == blocks  # each once an epoch
    assert requests(stoker.from_tar(many).batch(16)) == blocks + 2
    whole = stoker.from_tar(many, seed=3).shuffle(block=False).batch(16)
    assert "blocks" not in str(whole)
    assert requests(whole) == 480
    local = stoker.from_tar(tmp_path / "site" / "s-{0..1}.tar")
    data = {each["__key__"]: each["bin"] for each in local}
    for batch in train:
        assert all(data[k] == b for k, b in zip(batch["__key__"], batch["bin"], strict=True))
    assert stream(build(0)) == stream(build())
    check_resume(build, every=7)


def test_ranks_and_mixtures_read_together_too(many: str, handler: type[Ranges]) -> None:
    found: list[str] = []
    before = handler.counted
    for rank in range(2):
        train = stoker.from_tar(many, seed=3).shuffle().shard(rank=rank, world=2)
        found += [example["__key__"] for example in train]
    assert len(set(found)) == len(found) == 480
    assert handler.counted - before < 480 / 2  # each reads runs of its own, but for some
    tar = stoker.from_tar(many).shuffle()
    before = handler.counted
    mixed = stoker.mix({tar: 1, stoker.from_arrays(range(480)).shuffle(): 1}, seed=0)
    assert len(list(mixed)) == 960
    assert handler.counted - before < 480 / 4


def test_runs_that_are_no_longer_wanted_are_dropped(
    many: str, handler: type[Ranges], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.sources.remote.shard_runs.KEPT_BYTES", 4 * WINDOW << 13)
    train = stoker.from_tar(many, seed=3).shuffle().workers(1)
    blocks = int(re.search(r"shuffle\((\d+) blocks\)", str(train))[1])  # type: ignore[index]
    before = handler.counted
    assert len(list(train)) == 480
    assert handler.counted - before == blocks
    # Without room each is read again and again, and what comes is the same.
    monkeypatch.setattr("stoker.sources.remote.shard_runs.KEPT_BYTES", 0)
    train.set_epoch(0)
    before = handler.counted
    assert len(list(train)) == 480
    assert handler.counted - before > blocks


def test_large_examples_are_read_one_by_one(many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.sources.remote.shard_runs.RUN_BYTES", 1 << 10)
    assert "blocks" not in str(stoker.from_tar(many).shuffle())
    assert "shuffle(480 blocks)" in str(stoker.from_tar(many).shuffle(block=True))


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
    with pytest.raises(stoker.StageError, match=r"'00000\d': http.*s-0\.tar has changed"):
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
        train = stoker.from_tar(url, on_error=1)
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
