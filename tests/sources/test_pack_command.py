"""`stoker pack`: many files into few shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stoker
from command_line import Called, call
from stoker.pack import run as packing_run
from stoker.pack.run import PackedShard, pack_source


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def photographs(folder: Path, each: int = 20, suffixes: tuple[str, ...] = (".jpg",)) -> Path:
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for n in range(each):
            file = folder / name / f"{n:04}.x{suffixes[n % len(suffixes)]}"
            file.write_bytes(draw.bytes(int(draw.integers(0, 3000))))
    return folder


def run(*arguments: str | Path) -> Called:
    return call("pack", *arguments)


def packed(folder: Path) -> list[tuple[bytes, int]]:
    """Return what is in a folder of shards."""
    train = stoker.from_tar(folder / "*.tar")
    rows = [[data for name, data in row.items() if name != "__key__"] for row in train]
    return [(row[0], int(row[1])) for row in rows]


def test_a_folder_becomes_shards_of_about_a_size(tmp_path: Path) -> None:
    source = photographs(tmp_path / "train")
    done = run(source, tmp_path / "shards", "--shard-size", "16KiB")
    assert done.code == 0, done
    assert "40 examples in" in done.stdout
    assert "stoker.from_tar(" in done.stdout
    assert packed(tmp_path / "shards") == [tuple(e) for e in stoker.from_folder(source)]
    names = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert names == [*(f"shard-{n:06}.tar" for n in range(len(names) - 1)), "shards.json"]
    assert len(names) > 3
    told = json.loads((tmp_path / "shards" / "shards.json").read_text())
    assert (told["examples"], told["class_names"]) == (40, ["cat", "dog"])
    assert sum(shard["examples"] for shard in told["shards"]) == 40
    for shard in told["shards"]:
        assert (tmp_path / "shards" / shard["name"]).stat().st_size == shard["bytes"]
        assert shard["fields"] == ["jpg", "cls"]


def test_fields_are_called_as_the_files_are(tmp_path: Path) -> None:
    pack_of = {"a": (".jpg", ".JPEG"), "b": (".png", ".jpg")}
    for name, suffixes in pack_of.items():
        photographs(tmp_path / name, 4, suffixes)
        assert run(tmp_path / name, tmp_path / f"{name}-shards").code == 0
    fields = [set(next(iter(stoker.from_tar(tmp_path / f"{n}-shards/*.tar")))) for n in pack_of]
    assert fields == [{"__key__", "jpg", "cls"}, {"__key__", "image", "cls"}]


def test_any_source_of_named_fields(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import numpy as np, stoker\n"
        "def row(n):\n"
        "    return {'x': np.arange(n, dtype=np.int16), 'text': f'ä{n}', 'y': n / 2}\n"
        "rows = [row(n) for n in range(9)]\n"
        "def make():\n"
        "    return stoker.from_dataset(rows, seed=0)\n"
        "def shuffled():\n"
        "    return make().shuffle()\n"
        "def steps():\n"
        "    return make().steps(3)\n"
        "def mixed():\n"
        "    return stoker.mix([make().take(2)])\n"
        "def bare():\n"
        "    return stoker.from_dataset([1, 2])\n"
    )
    assert run(f"{tmp_path}/data.py:make", tmp_path / "tar").code == 0
    row = list(stoker.from_tar(tmp_path / "tar/*.tar"))[3]
    assert (row["text"].decode(), row["y"]) == ("ä3", b"1.5")
    assert row["x.npy"].startswith(b"\x93NUMPY")
    for function, says in (
        ("shuffled", "leave out the stages"),
        ("steps", "leave out the stages"),
        ("mixed", "pack each of its sources"),
        ("bare", "named fields"),
    ):
        done = run(f"{tmp_path}/data.py:{function}", tmp_path / function)
        assert (done.code, says in done.stderr) == (1, True)


def pack_rows(folder: Path, rows: list[Any], shard_bytes: int = 1 << 20) -> list[PackedShard]:
    source: Any = stoker.from_dataset(rows).chain.source
    return pack_source(source, str(folder), shard_bytes)


def test_the_fields_that_are_told_are_those_that_are_read(tmp_path: Path) -> None:
    rows = [{"x": np.arange(3), "y": n, **({"z": b"z"} if n < 2 else {})} for n in range(4)]
    shards = pack_rows(tmp_path / "s", rows, 4_000)
    assert [set(each.fields) for each in shards] == [{"x.npy", "y", "z"}, {"x.npy", "y"}]
    found = list(stoker.from_tar(tmp_path / "s/*.tar", ["x.npy", "y"]))
    assert [row["y"] for row in found] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("first", ["image", "data"])
def test_dicts_may_have_the_names_of_a_folders_fields(tmp_path: Path, first: str) -> None:
    table = pa.table({first: [b"x", b"y"], "label": [0, 1]})
    source: Any = stoker.from_table(table).chain.source
    pack_source(source, str(tmp_path / "s"), 1 << 20)
    found = list(stoker.from_tar(tmp_path / "s/*.tar"))
    assert [(row[first], row["label"]) for row in found] == [(b"x", b"0"), (b"y", b"1")]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"a/b": 1}], "example 0: 'a/b' cannot be a field of a tar shard"),
        ([{"Text": "x"}], "example 0: 'Text' cannot be a field of a tar shard"),
        ([{1: 2}], "example 0: 1 cannot be a field"),
        ([{"a": 1}, {"a": {}}], "example 1: 'a' is a dict: tar shards hold bytes, text, numbers"),
        ([{"x": np.arange(2), "x.npy": b""}], "two of its fields would have the same name"),
        ([1, 2, 3], "named fields"),
        ([], "has no examples"),
    ],
)
def test_what_cannot_be_packed_is_said(tmp_path: Path, rows: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pack_rows(tmp_path / "s", rows, 40)
    assert not list(tmp_path.glob("s/*part*"))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    def add(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing_run._TarWriter, "add", add)
    with pytest.raises(OSError, match=rf"No space left.*{tmp_path}"):
        pack_rows(tmp_path / "s", [{"a": 1}])
    assert not list((tmp_path / "s").iterdir())


def test_a_failed_run_leaves_whole_shards_without_a_list(tmp_path: Path) -> None:
    rows: list[Any] = [{"a": n} for n in range(9)]
    with pytest.raises(ValueError, match="example 9: 'a' is a NoneType"):
        pack_rows(tmp_path / "s", [*rows, {"a": None}], 2048)
    names = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert names == [f"shard-{n:06}.tar" for n in range(4)]
    found = [row["a"] for row in stoker.from_tar(tmp_path / "s/*.tar")]
    assert found == [b"%d" % n for n in range(8)]
    with pytest.raises(ValueError, match=r"holds files, such as 'shard-000000\.tar': give an em"):
        pack_rows(tmp_path / "s", rows)


def test_nothing_of_others_is_touched(tmp_path: Path) -> None:
    source = photographs(tmp_path / "train", 4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shard-000000.tar").write_bytes(b"mine")
    done = run(source, tmp_path / "mine")
    assert (done.code, "holds files, such as 'shard-000000.tar'" in done.stderr) == (1, True)
    assert (tmp_path / "mine" / "shard-000000.tar").read_bytes() == b"mine"


def test_what_is_refused(tmp_path: Path) -> None:
    source = photographs(tmp_path / "train", 2)
    for arguments, says in (
        ((source, tmp_path / "s", "--shard-size", "big"), "big"),
        ((tmp_path / "nowhere", tmp_path / "s"), "nowhere"),
    ):
        done = run(*arguments)
        assert done.code == 1
        assert says in done.stderr
    broken = tmp_path / "train" / "cat" / "gone.jpg"
    broken.symlink_to(tmp_path / "nowhere.jpg")
    done = run(source, tmp_path / "s")
    assert (done.code, "gone.jpg" in done.stderr) == (1, True)
    broken.unlink()
    assert not list((tmp_path / "s").glob("shard-*"))


def test_a_disk_that_loses_bytes_is_noticed(tmp_path: Path, monkeypatch: Any) -> None:
    source: Any = stoker.from_folder(photographs(tmp_path / "train", 4)).chain.source
    whole = packing_run._TarWriter.add

    def add(self: Any, key: str, example: Any) -> None:
        whole(self, key, example)
        self._expected[-1][1]["jpg"] ^= 1

    monkeypatch.setattr(packing_run._TarWriter, "add", add)
    with pytest.raises(ValueError, match="reads back differently"):
        pack_source(source, str(tmp_path / "s"), 1000)
    assert not list((tmp_path / "s").iterdir())
