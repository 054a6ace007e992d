"""Zip archives, token files and Parquet behind URLs, read by ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import pack, pairs
from test_remote_shards import COUNT, Ranges, handler, url

import stoker
from stoker.testing import check_resume
from strategies import stream

__all__ = ["handler", "url"]  # fixtures


@pytest.fixture
def site(url: str) -> str:
    return url.rpartition("/")[0]


def tables(folder: Path) -> Path:
    rows = {"n": list(range(60)), "text": ["x" * (n % 9) for n in range(60)], "y": [0.5] * 60}
    table = pa.table(rows)
    pq.write_table(table.slice(0, 35), folder / "a.parquet", row_group_size=10)
    pq.write_table(table.slice(35), folder / "b.parquet", row_group_size=10)
    return folder


def test_zip_archives_are_the_same_as_local_ones(site: str, tmp_path: Path, handler: Any) -> None:
    for n in range(2):
        pack(tmp_path / "site" / f"z-{n}.zip", pairs(n * COUNT, COUNT))

    def build(shards: Any = f"{site}/z-{{0..1}}.zip", workers: int = 2) -> stoker.Pipeline:
        return stoker.from_tar(shards, seed=1, requests=4).shuffle().batch(5).workers(workers)

    local = stream(build(tmp_path / "site" / "z-{0..1}.zip"))
    assert stream(build()) == stream(build(workers=0)) == local
    check_resume(build, every=4)
    before = handler.counted
    assert len(list(build())) == 5
    assert handler.counted - before == 2 + 2  # of few MiB; the index was kept


def test_files_of_an_example_that_lie_far_apart(site: str, tmp_path: Path) -> None:
    files = pairs(0, 400)
    files = {name: data + bytes(500) for name, data in files.items()}
    apart = dict(sorted(files.items(), key=lambda item: item[0].rpartition(".")[2]))
    pack(tmp_path / "site" / "s.tar", apart)
    assert len(stoker.from_tar(tmp_path / "site" / "s.tar")) == 400
    with pytest.raises(ValueError, match=r"s\.tar: the files of example .* bytes apart.*pack"):
        stoker.from_tar(f"{site}/s.tar")


@pytest.mark.parametrize("separator", [3, pytest.param(None, marks=pytest.mark.full)])
def test_windows_of_tokens(site: str, tmp_path: Path, separator: Any, handler: Any) -> None:
    draw = np.random.default_rng(0)
    draw.integers(0, 9, 100).astype(np.uint16).tofile(tmp_path / "site" / "t-0.bin")
    draw.integers(0, 9, 57).astype(np.uint16).tofile(tmp_path / "site" / "t-1.bin")
    np.save(tmp_path / "site" / "t.npy", draw.integers(0, 9, 64).astype(np.int32))

    def build(files: Any, dtype: Any = "uint16", workers: int = 2) -> stoker.Pipeline:
        tokens = stoker.from_tokens(files, 8, 14, dtype, separator=separator, seed=1)
        return tokens.shuffle().batch(4).workers(workers)

    for name, dtype in (("t-{0..1}.bin", "uint16"), ("t.npy", None)):
        local = stream(build(tmp_path / "site" / name, dtype))
        assert stream(build(f"{site}/{name}", dtype)) == local
        assert stream(build(f"{site}/{name}", dtype, workers=0)) == local
        check_resume(lambda: build(f"{site}/{name}", dtype), every=6)  # noqa: B023
    with pytest.raises(ValueError, match=r"t-1\.bin is truncated, or of another dtype"):
        stoker.from_tokens(f"{site}/t-1.bin", 8, dtype="int64")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        stoker.from_tokens(f"{site}/nowhere.bin", 8, dtype="uint8")
    train = stoker.from_tokens(f"{site}/t-0.bin", 8, dtype="uint16")
    (tmp_path / "site" / "t-0.bin").write_bytes(bytes(20))
    with pytest.raises(stoker.StageError, match=r"t-0\.bin: it has 20 bytes now"):
        list(train)


def test_files_behind_signed_urls(site: str, tmp_path: Path) -> None:
    folder = tables(tmp_path / "site")
    tokens = np.arange(64, dtype=np.uint16)
    np.save(folder / "t.npy", tokens)
    (folder / "t.npy").rename(folder / "t")
    np.save(folder / "t.npy", tokens)
    for name in ("t.npy?sig=a[b]*", "t", "t?sig=x.bin"):
        first = next(iter(stoker.from_tokens(f"{site}/{name}", 9, dtype="uint16")))
        assert first.inputs.tolist() == [*range(9)]
    (folder / "a.parquet").rename(folder / "part-0")
    for name, rows in (("b.parquet?sig=x/[y]*", 25), ("part-0?sig=x", 35), ("part-0", 35)):
        assert len(stoker.from_parquet(f"{site}/{name}")) == rows
    with pytest.raises(FileNotFoundError, match="nowhere"):
        stoker.from_parquet(f"{site}/nowhere")
    (file,) = stoker.from_files(f"{site}/part-0?sig=[1]*")
    assert file.data == (folder / "part-0").read_bytes()


def test_a_file_of_no_tokens_among_others(
    site: str, tmp_path: Path, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "0.bin").touch()
    (tmp_path / "site" / "1.bin").write_bytes(bytes(20))
    names = [f"{site}/0.bin", f"{site}/1.bin"]
    assert len(stoker.from_tokens(names, 9, dtype="uint8")) == 2
    monkeypatch.setattr(handler, "can", False)  # as Apache: 200, and no byte
    with pytest.raises(ValueError, match="the longest of 1 files has 0"):
        stoker.from_tokens(names[0], 9, dtype="uint8")


def test_a_file_that_has_grown_is_noticed(site: str, tmp_path: Path) -> None:
    at = tmp_path / "site" / "t.bin"
    np.zeros(99, np.uint16).tofile(at)
    train = stoker.from_tokens(f"{site}/t.bin", 8, dtype="uint16")
    np.ones(999, np.uint16).tofile(at)
    with pytest.raises(stoker.StageError, match="has 1,998 bytes now, and had 198 when"):
        list(train)
    table = pa.table({"n": range(100)})
    pq.write_table(table, tmp_path / "site" / "n.parquet", 50, compression="none")
    rows = stoker.from_parquet(f"{site}/n.parquet")
    longer = pa.table({"n": range(1000, 1120)})
    pq.write_table(longer, tmp_path / "site" / "n.parquet", 50, compression="none")
    with pytest.raises(stoker.StageError, match="bytes now, and had"):
        list(rows)
    for name in ("s.tar", "z.zip"):
        pack(tmp_path / "site" / name, pairs(0, COUNT))
        archive = stoker.from_tar(f"{site}/{name}").shuffle(block=False)
        pack(tmp_path / "site" / name, pairs(0, 10 * COUNT))
        with pytest.raises(stoker.StageError, match=rf"{name}: it has .* bytes now, and had"):
            list(archive)


def test_a_server_that_tells_no_sizes(
    site: str, tmp_path: Path, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "t.bin").write_bytes(bytes(99))
    send = handler.send_header

    def untold(self: Any, name: str, value: str) -> None:
        send(self, name, "bytes 0-0/*" if name == "Content-Range" else value)

    monkeypatch.setattr(handler, "send_header", untold)
    with pytest.raises(stoker.RemoteError, match="does not state its size"):
        stoker.from_tokens(f"{site}/t.bin", 8, dtype="uint8")
    with pytest.raises(stoker.RemoteError, match="does not state its size"):
        stoker.from_tar(f"{site}/t.bin")


def test_tables(site: str, tmp_path: Path, handler: Any) -> None:
    folder = tables(tmp_path / "site")

    def build(paths: Any, workers: int = 2, kind: str = "thread") -> stoker.Pipeline:
        table = stoker.from_parquet(paths, ["n", "text"], seed=1, requests=4)
        return table.shuffle().batch(7).workers(workers, kind=kind)

    local = stream(build(folder))
    remote = f"{site}/{{a,b}}.parquet"
    assert stream(build(remote)) == stream(build(remote, 0)) == local
    assert stream(build(remote, 1, "process")) == local
    check_resume(lambda: build(remote), every=4)
    train = build(remote)
    before = handler.counted
    for _ in range(2):
        list(train)
    assert handler.counted - before == 7  # each row group once
    files = [f"{site}/b.parquet", f"{site}/a.parquet"]
    assert [int(row["n"]) for row in stoker.from_parquet(files)] == [*range(35, 60), *range(35)]


def test_tables_that_do_not_fit(site: str, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tables(tmp_path / "site")
    monkeypatch.setattr("stoker.sources.arrow.parquet.usable_memory_bytes", lambda: 0)
    remote = stoker.from_parquet(f"{site}/{{a,b}}.parquet", seed=1).shuffle().batch(7).workers(2)
    local = stoker.from_parquet(folder, seed=1).shuffle().batch(7).workers(2)
    assert stream(remote) == stream(local)


def test_a_folder_of_an_object_store(tmp_path: Path) -> None:
    folder = tables(tmp_path)
    memory = fsspec.filesystem("memory")
    try:
        for name in ("a", "b"):
            memory.pipe(f"/t/part/{name}.parquet", (folder / f"{name}.parquet").read_bytes())
        found = stoker.from_parquet("memory://t/", seed=0).batch(60)
        assert next(iter(found))["n"].tolist() == [*range(60)]
    finally:
        memory.rm("/t", recursive=True)


def test_a_long_footer(site: str, tmp_path: Path) -> None:
    wide = pa.table({f"column {n} {'x' * 40}": [n, n + 1] for n in range(700)})
    pq.write_table(wide, tmp_path / "site" / "wide.parquet")
    assert (tmp_path / "site" / "wide.parquet").stat().st_size > 1 << 16
    rows = [dict(row) for row in stoker.from_parquet(f"{site}/wide.parquet")]
    assert rows == wide.to_pylist()


def test_servers_without_ranges_and_files_that_are_none(
    site: str, tmp_path: Path, handler: type[Ranges]
) -> None:
    tables(tmp_path / "site")
    (tmp_path / "site" / "no.parquet").write_bytes(b"PAR1" + bytes(50))
    (tmp_path / "site" / "cut.parquet").write_bytes(
        (tmp_path / "site" / "a.parquet").read_bytes()[:-9]
    )
    for name in ("no", "cut"):
        with pytest.raises(
            ValueError, match=rf"{name}\.parquet is not a Parquet file, or is trunc"
        ):
            stoker.from_parquet(f"{site}/{name}.parquet")
    train = stoker.from_parquet(f"{site}/a.parquet").batch(4)
    (tmp_path / "site" / "a.parquet").write_bytes((tmp_path / "site" / "b.parquet").read_bytes())
    with pytest.raises(
        stoker.StageError, match=r"a\.parquet.*(damaged, or the file has changed|bytes now)"
    ):
        list(train)
    handler.can = False
    for make in (
        lambda: stoker.from_parquet(f"{site}/a.parquet"),
        lambda: stoker.from_tokens(f"{site}/a.parquet", 4, dtype="uint8"),
    ):
        with pytest.raises(stoker.RemoteError, match="whole files only"):
            make()
    with pytest.raises(ValueError, match="local path, among URLs"):
        stoker.from_parquet([f"{site}/a.parquet", str(tmp_path / "site" / "b.parquet")])


def test_filters_read_the_ranges_of_their_columns_alone(
    site: str, tmp_path: Path, handler: Any
) -> None:
    tables(tmp_path / "site")
    files = f"{site}/{{a,b}}.parquet"
    before = handler.counted
    some = stoker.from_parquet(files, ["text"], filters=[("n", ">=", 30), ("n", "<", 38)])
    assert handler.counted - before == 2 * 2 + 2  # sizes and footers; a row group of each file
    assert [len(row["text"]) for row in some] == [n % 9 for n in range(30, 38)]
    train = stoker.from_parquet(files, filters=[("n", "in", [3, 33, 59])], seed=1)
    assert sorted(int(row["n"]) for row in train.shuffle()) == [3, 33, 59]
