"""Sources with an index under everything that stands behind one: the same examples each time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from shards import pack

import stoker
from stoker.testing import check_resume
from strategies import stream

COUNT = 60
_names = itertools.count()


def number(example: Any) -> int:
    """Return the number of an example, whatever the source made of it."""
    if isinstance(example, dict):
        return int(example["n"])
    first = example[0] if isinstance(example, tuple) else example
    return int(first) if isinstance(first, bytes) else int(np.asarray(first).flat[0])


def folder(at: Path) -> Any:
    for n in range(COUNT):
        (at / "sound" / f"{n % 3}").mkdir(parents=True, exist_ok=True)
        (at / "sound" / f"{n % 3}" / f"{n:03}.txt").write_bytes(b"%d" % n)
    return stoker.from_folder(at / "sound", extensions=["txt"], seed=1)


def hdf5(at: Path) -> Any:
    if not (at / "x.h5").exists():
        with h5py.File(at / "x.h5", "w") as file:
            file.create_dataset("n", data=np.arange(COUNT), chunks=(7,))
    with h5py.File(at / "x.h5") as file:
        return stoker.from_arrays(file["n"], seed=1)


def zarred(at: Path) -> Any:
    array = zarr.create_array(
        store=str(at / "x"), data=np.arange(COUNT), chunks=(7,), overwrite=True
    )
    return stoker.from_arrays(array, np.arange(COUNT), seed=1)


def huggingface(at: Path) -> Any:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"n": list(range(COUNT))}).save_to_disk(str(at / "d"))
    return stoker.from_huggingface(datasets.load_from_disk(str(at / "d")), seed=1)


def parquet(at: Path) -> Any:
    pq.write_table(pa.table({"n": list(range(COUNT))}), at / "n.parquet", row_group_size=9)
    return stoker.from_parquet(at / "n.parquet", seed=1)


def zipped(at: Path) -> Any:
    pack(at / "n.zip", {f"{n:03}.n": b"%d" % n for n in range(COUNT)})
    return stoker.from_tar(at / "n.zip", ["n"], seed=1)


def remote(at: Path) -> Any:
    pq.write_table(pa.table({"n": list(range(COUNT))}), at / "n.parquet", row_group_size=9)
    return stoker.from_parquet(f"file://{at}/n.parquet", seed=1)


def remote_tokens(at: Path) -> Any:
    np.arange(COUNT + 1, dtype=np.uint16).tofile(at / "t.bin")
    return stoker.from_tokens(f"file://{at}/t.bin", 1, dtype="uint16", seed=1)


SOURCES = [folder, hdf5, zarred, huggingface, parquet, zipped, remote, remote_tokens]
each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda made: made.__name__)
pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def odd(n: int) -> bool:
    return n % 2 == 1


def fails_on_some(n: int) -> int:
    if n in (7, 21):
        raise ValueError("a bad example")
    return n


def ways(version: str) -> dict[str, Callable[[stoker.Pipeline], stoker.Pipeline]]:
    """Return what may stand behind a source, of examples that are numbers from ``map`` on."""
    return {
        "plain": lambda p: p.shuffle().map(number),
        "blocks": lambda p: p.shuffle(block=8).map(number),
        "cache": lambda p: p.shuffle().map(number).cache("2MiB", version=version),
        "filter": lambda p: p.shuffle().map(number).filter(odd),
        "budget": lambda p: p.shuffle().map(number).map(fails_on_some, max_errors=5),
        "echo": lambda p: p.shuffle().map(number).echo(2, pool=24),
        "rank": lambda p: p.shuffle().shard(rank=1, world_size=2).map(number),
        "take": lambda p: p.shuffle().take(20).map(number),
    }


@each_source
def test_every_way_is_the_same_for_any_workers_and_resumes(tmp_path: Path, source: Any) -> None:
    made = source(tmp_path)
    for name, way in ways(f"{source.__name__}").items():

        def build(workers: int = 0, way: Any = way) -> stoker.Pipeline:
            return way(made).batch(6).workers(workers)

        inline = stream(build())
        assert inline, name
        assert stream(build(2)) == inline, name
        check_resume(build, every=4)


@each_source
def test_process_workers_read_what_threads_do(tmp_path: Path, source: Any) -> None:
    made = source(tmp_path).shuffle().map(number).batch(6)
    threads = stream(made.workers(0))
    assert sorted(int(n) for batch in made.workers(0) for n in batch) == [*range(COUNT)]
    assert stream(made.workers(1, kind="process")) == threads


TARGET = """
import sys

sys.path[:0] = {path!r}
from pathlib import Path

import test_together


def make():
    made = test_together.{source}(Path({at!r}))
    return made.shuffle().map(test_together.number).batch(6).workers(1)
"""


@pytest.mark.parametrize("source", [folder, remote], ids=lambda made: made.__name__)
def test_one_preparation_for_many_jobs(tmp_path: Path, source: Any) -> None:
    here = Path(__file__).parent
    (tmp_path / "data").mkdir()
    text = TARGET.format(
        path=[str(here), str(here.parent)], source=source.__name__, at=str(tmp_path / "data")
    )
    (tmp_path / "prep.py").write_text(text)
    name = f"sources-{os.getpid()}-{next(_names)}"
    train = stoker.feed(f"{tmp_path}/prep.py:make", name=name, timeout_s=30.0)
    batches = iter(train)
    head = [[int(n) for n in next(batches)] for _ in range(4)]
    state = train.state_dict()
    tail = [[int(n) for n in batch] for batch in batches]
    assert sorted(itertools.chain(*head, *tail)) == [*range(COUNT)]
    train.load_state_dict(state)
    assert [[int(n) for n in batch] for batch in train] == tail
    alone = source(tmp_path / "data").shuffle().map(number).batch(6)
    assert [[int(n) for n in batch] for batch in alone] == head + tail


def test_a_mixture_of_them(tmp_path: Path) -> None:
    sources = [made(tmp_path) for made in (hdf5, huggingface, parquet, zipped)]

    def build(workers: int = 0) -> stoker.Pipeline:
        parts = [source.shuffle().map(number) for source in sources]
        return stoker.mix(parts, seed=0).batch(6).workers(workers)

    assert stream(build()) == stream(build(2))
    check_resume(build, every=6)
