"""`stoker pack`: many files into few shards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import stoker
from stoker.cli import app
from stoker.pack import run as packing_run
from stoker.pack.journal import lock_folder
from stoker.pack.run import pack_source
from strategies import few

pytest.importorskip("pyarrow")


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


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["pack", *map(str, arguments)])


def packed(folder: Path) -> list[tuple[bytes, int]]:
    """Return what is in a folder of shards."""
    if list(folder.glob("*.parquet")):
        return [(row["image"], int(row["label"])) for row in stoker.from_parquet(folder)]
    train = stoker.from_tar(folder / "*.tar")
    rows = [[data for name, data in row.items() if name != "__key__"] for row in train]
    return [(row[0], int(row[1])) for row in rows]


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_a_folder_becomes_shards_of_about_a_size(tmp_path: Path, form: str) -> None:
    source = photographs(tmp_path / "train")
    done = run(source, tmp_path / "shards", "--shard-size", "16KiB", "--format", form)
    assert done.exit_code == 0, done.output
    assert "40 examples in" in done.stdout
    assert f"stoker.from_{form}(" in done.stdout
    assert packed(tmp_path / "shards") == [tuple(e) for e in stoker.from_folder(source)]
    names = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert names == [*(f"shard-{n:06}.{form}" for n in range(len(names) - 1)), "shards.json"]
    assert len(names) > 3
    told = json.loads((tmp_path / "shards" / "shards.json").read_text())
    assert told["class_names"] == ["cat", "dog"]
    assert sum(shard["examples"] for shard in told["shards"]) == 40
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("shard-*")}
    again = run(source, tmp_path / "shards", "--shard-size", "16KiB", "--format", form)
    assert again.stdout == done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_fields_are_called_as_the_files_are(tmp_path: Path) -> None:
    pack_of = {"a": (".jpg", ".JPEG"), "b": (".png", ".jpg")}
    for name, suffixes in pack_of.items():
        photographs(tmp_path / name, 4, suffixes)
        assert run(tmp_path / name, tmp_path / f"{name}-shards").exit_code == 0
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
        "def bare():\n"
        "    return stoker.from_dataset([1, 2])\n"
    )
    assert run(f"{tmp_path}/data.py:make", tmp_path / "tar").exit_code == 0
    row = list(stoker.from_tar(tmp_path / "tar/*.tar"))[3]
    assert (row["text"].decode(), row["y"]) == ("ä3", b"1.5")
    assert row["x.npy"].startswith(b"\x93NUMPY")
    assert run(f"{tmp_path}/data.py:make", tmp_path / "p", "--format", "parquet").exit_code == 0
    row = list(stoker.from_parquet(tmp_path / "p"))[3]
    assert (row["text"], row["y"], row["x"].tolist()) == ("ä3", 1.5, [0, 1, 2])
    for function, says in (("shuffled", "leave out the stages"), ("bare", "named fields")):
        done = run(f"{tmp_path}/data.py:{function}", tmp_path / function)
        assert done.exit_code == 1
        assert says in done.stderr


def pack_rows(folder: Path, rows: list[Any], form: str, shard_bytes: int = 1 << 20) -> Any:
    source: Any = stoker.from_dataset(rows).chain.source
    return pack_source(source, str(folder), shard_bytes=shard_bytes, shard_format=form)


def test_the_fields_that_are_told_are_those_that_are_read(tmp_path: Path) -> None:
    rows = [{"x": np.arange(3), "y": n, **({"z": b"z"} if n < 2 else {})} for n in range(4)]
    told = pack_rows(tmp_path / "s", rows, "tar", 4_000)
    assert (told.fields, len(told.shards)) == (["x.npy", "y"], 2)
    found = list(stoker.from_tar(tmp_path / "s/*.tar", told.fields))
    assert [row["y"] for row in found] == [b"0", b"1", b"2", b"3"]


def test_parquet_keeps_dtypes_shapes_and_nan(tmp_path: Path) -> None:
    row = {
        "image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        "wave": np.array([1.5, np.nan], np.float32),
        "swapped": np.arange(2, dtype=">i4"),
        "one": np.float32(0.1),
        "nan": float("nan"),
        "nothing": None,
        "when": np.datetime64("2026-01-01"),
    }
    pack_rows(tmp_path / "s", [row] * 3, "parquet")
    for found in stoker.from_parquet(tmp_path / "s"):
        for name in ("image", "wave", "swapped", "one"):
            value: Any = row[name]
            assert found[name].dtype == value.dtype.newbyteorder("=")
            np.testing.assert_array_equal(found[name], value)
        assert np.isnan(found["nan"])
        assert found["nothing"] is None


def test_parquet_shards_are_of_the_size_asked_for_with_arrays_of_many_axes(tmp_path: Path) -> None:
    rows = [{"image": np.full((50, 60, 3), n, np.uint8)} for n in range(40)]
    told = pack_rows(tmp_path / "s", rows, "parquet", 90_000)
    assert [count for _, count in told.shards] == [10] * 4


@pytest.mark.parametrize(
    ("rows", "form", "says"),
    [
        ([{"a": 1}, {"a": 1, "b": 2}], "parquet", r"example 1: its fields are \['a', 'b'\]"),
        ([{"a": 1, "b": 2}, {"a": 1}], "parquet", r"example 1: its fields are \['a'\]"),
        (
            [{"a": 1}] * 5 + [{"a": 0.5}],
            "parquet",
            "'a' has type double, but had type int64",
        ),  # another shard
        (
            [{"a": None}] * 5 + [{"a": 1}],
            "parquet",
            "'a' has type int64, but it was None .* put an example",
        ),
        ([{"a": 1 << 70}], "parquet", "1 examples cannot be stored in Parquet"),
        ([{"a": {}}], "parquet", "cannot be stored in Parquet"),
        ([{1: 2}], "parquet", "its fields are"),
        ([{"a/b": 1}], "tar", "example 0: 'a/b' cannot be a field of a tar shard"),
        ([{"Text": "x"}], "tar", "example 0: 'Text' cannot be a field of a tar shard"),
        ([{1: 2}], "tar", "example 0: 1 cannot be a field"),
        ([{"x": np.arange(2), "x.npy": b""}], "tar", "two of its fields would have the same name"),
        ([], "tar", "has no examples"),
    ],
)
def test_what_cannot_be_packed_is_said(tmp_path: Path, rows: Any, form: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pack_rows(tmp_path / "s", rows, form, 40)
    assert not list(tmp_path.glob("s/*part*"))


def test_other_data_under_the_same_names_is_another_packing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="named fields"):
        pack_rows(tmp_path / "s", [1, 2, 3], "tar")
    pack_rows(tmp_path / "s", [{"a": n} for n in range(3)], "tar")  # nothing was done before
    with pytest.raises(ValueError, match=r"other settings \(first differ\)"):
        pack_rows(tmp_path / "s", [{"a": n} for n in range(1, 4)], "tar")


def test_what_stands_behind_a_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import stoker\n"
        "rows = [{'a': n} for n in range(9)]\n"
        "def steps():\n"
        "    return stoker.from_dataset(rows).steps(3)\n"
        "def mixed():\n"
        "    return stoker.mix({stoker.from_dataset(rows).take(2): 1})\n"
    )
    for function, says in (
        ("steps", "leave out the stages"),
        ("mixed", "pack each of its sources"),
    ):
        done = run(f"{tmp_path}/data.py:{function}", tmp_path / function)
        assert (done.exit_code, says in done.stderr) == (1, True)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    def add(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for form, kind in packing_run.FORMATS.items():
        monkeypatch.setattr(kind, "add", add)
        with pytest.raises(OSError, match=rf"No space left.*{tmp_path}"):
            pack_rows(tmp_path / form, [{"a": 1}], form)
        assert [path.name for path in (tmp_path / form).iterdir()] == [".packing.json"]


class Stop(Exception):
    pass


@settings(few(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 60), max_size=3), form=st.sampled_from(["tar", "parquet"]))
def test_it_goes_on_where_it_was_stopped(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], form: str
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    source: Any = stoker.from_folder(photographs(folder / "train", 10)).chain.source
    kind = packing_run.FORMATS[form]
    whole = kind.add

    def pack(to: Path) -> None:
        pack_source(source, str(to), shard_bytes=5_000, shard_format=form)

    for stop in stops:
        left = [stop]

        def add(self: Any, key: str, example: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Stop
            whole(self, key, example)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "add", add)
            try:
                pack(folder / "shards")
            except Stop:
                assert not list((folder / "shards").glob(".part*"))
    pack(folder / "shards")
    pack(folder / "at-once")
    files = [
        {path.name: path.read_bytes() for path in (folder / name).iterdir()}
        for name in ("shards", "at-once")
    ]
    assert files[0] == files[1]


@pytest.mark.full
@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_a_killed_run_leaves_what_the_next_one_goes_on_with(tmp_path: Path, form: str) -> None:
    source = photographs(tmp_path / "train", 1500)
    start = "from stoker.cli import main; main()"
    command = [sys.executable, "-c", start, "pack", str(source), str(tmp_path / "shards")]
    command += ["--shard-size", "32KiB", "--format", form]
    for shards in (1, 4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while len(list((tmp_path / "shards").glob("shard-*"))) < shards and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, check=True, capture_output=True).returncode == 0
    assert packed(tmp_path / "shards") == [tuple(e) for e in stoker.from_folder(source)]
    assert not [path for path in (tmp_path / "shards").iterdir() if path.name.startswith(".")]


def test_nothing_of_others_is_touched(tmp_path: Path) -> None:
    source = photographs(tmp_path / "train", 4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shard-000000.tar").write_bytes(b"mine")
    done = run(source, tmp_path / "mine")
    assert (done.exit_code, "holds other files, such as 'shard-000000.tar'" in done.stderr) == (
        1,
        True,
    )
    assert (tmp_path / "mine" / "shard-000000.tar").read_bytes() == b"mine"
    assert run(source, tmp_path / "shards").exit_code == 0
    (source / "cat" / "new.jpg").write_bytes(b"x")
    assert "other settings (examples, names differ)" in run(source, tmp_path / "shards").stderr
    (source / "cat" / "new.jpg").unlink()
    assert (
        "other settings (shard_bytes differ)"
        in run(source, tmp_path / "shards", "--shard-size", "1MiB").stderr
    )
    os.truncate(tmp_path / "shards" / "shard-000000.tar", 512)
    assert "is missing or has changed" in run(source, tmp_path / "shards").stderr
    with lock_folder(str(tmp_path / "shards")):
        assert "another run of stoker pack" in run(source, tmp_path / "shards").stderr


def test_what_is_refused(tmp_path: Path) -> None:
    source = photographs(tmp_path / "train", 2)
    for arguments, says in (
        ((source, tmp_path / "s", "--format", "zip"), "--format must be tar or parquet, not zip"),
        ((source, tmp_path / "s", "--shard-size", "big"), "big"),
        ((tmp_path / "nowhere", tmp_path / "s"), "nowhere"),
    ):
        done = run(*arguments)
        assert done.exit_code == 1
        assert says in done.stderr
    broken = tmp_path / "train" / "cat" / "gone.jpg"
    broken.symlink_to(tmp_path / "nowhere.jpg")
    done = run(source, tmp_path / "s")
    assert (done.exit_code, "gone.jpg" in done.stderr) == (1, True)
    broken.unlink()
    assert not list((tmp_path / "s").glob("shard-*"))


def test_a_disk_that_loses_bytes_is_noticed(tmp_path: Path, monkeypatch: Any) -> None:
    source: Any = stoker.from_folder(photographs(tmp_path / "train", 4)).chain.source
    for form, kind in packing_run.FORMATS.items():
        whole = kind.add

        def add(self: Any, key: str, example: Any, whole: Any = whole) -> None:
            whole(self, key, {**example})
            if hasattr(self, "_expected"):
                self._expected[-1][1]["jpg"] ^= 1
            else:
                self._write_group()
                self._groups[-1] = self._groups[-1].slice(1)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "add", add)
            with pytest.raises(ValueError, match="reads back differently"):
                pack_source(source, str(tmp_path / form), shard_bytes=1000, shard_format=form)
        assert not list((tmp_path / form).glob("*shard-*"))
