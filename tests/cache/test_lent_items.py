"""Large items on their way from a cache into a batch: copied once, and nobody's to change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from stores import counted

import stoker
from stoker.basics.buffers import reads_only

COUNT, WIDE = 24, 30_000  # numbers of 4 bytes: more than a block


class Item(NamedTuple):
    pixels: np.ndarray
    name: str
    more: dict[str, np.ndarray]


def row(index: int) -> np.ndarray:
    return np.arange(WIDE, dtype=np.float32) + index


@stoker.thread_safe
class Rows:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if self.kind == "array":
            return row(index)
        if self.kind == "tensor":
            return pytest.importorskip("torch").from_numpy(row(index))
        return Item(row(index), f"{index}", {"wide": row(index) * 2, "small": np.array([index])})


def first(batch: Any) -> np.ndarray:
    return np.asarray(batch.pixels if isinstance(batch, Item) else batch)


@pytest.mark.parametrize("kind", ["array", "tensor", "nested"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_are_copies(kind: str, workers: int, in_memory: bool, tmp_path: Path) -> None:
    place: dict[str, Any] = {} if in_memory else {"path": tmp_path, "keep": False}
    pipeline = stoker.from_dataset(Rows(kind), seed=0).cache("64MiB", **place)
    pipeline = pipeline.shuffle().batch(5).workers(workers)
    list(pipeline)
    for _ in range(3):
        seen = []
        for batch in pipeline:
            rows = first(batch)
            assert np.array_equal(rows, np.stack([row(int(each[0])) for each in rows]))
            if kind == "nested":
                assert [int(name) for name in batch.name] == rows[:, 0].tolist()
                assert np.array_equal(batch.more["wide"], rows * 2)
                batch.more["wide"][:] = -1
            seen += rows[:, 0].tolist()
            rows[:] = -1  # is the consumer's own
        assert sorted(seen) == list(range(COUNT))
    assert counted(pipeline).hits > 0  # how many depends on the thread that writes


def test_a_function_of_the_user_gets_its_own() -> None:
    def changed(x: np.ndarray) -> np.ndarray:
        x += 1  # would fail on what cannot be written to, and change the store otherwise
        return x

    kept: list[np.ndarray] = []

    @reads_only
    def looked_at(x: np.ndarray) -> np.ndarray:
        kept.append(x)
        assert x.flags.writeable
        return x

    source = stoker.from_dataset(Rows("array"), seed=0).cache("64MiB")
    for pipeline, more in ((source.map(changed), 1), (source.map(looked_at), 0), (source, 0)):
        for _ in range(2):
            found = [float(x[0]) for batch in pipeline.batch(4).workers(0) for x in batch]
            assert found == [index + more for index in range(COUNT)]
        for index, each in enumerate(pipeline.workers(0)):
            assert np.array_equal(each, row(index) + more)
            each[:] = -1


def test_images_are_cropped_where_they_lie() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 200, 210, 3), np.uint8)
    source = stoker.from_dataset(list(pixels), seed=0).cache("64MiB", version="pixels")
    crop = stoker.images.center_crop(64)
    pipeline = source.map(crop).batch(4).workers(0)
    expected = np.stack([crop(each) for each in pixels])
    for _ in range(3):
        assert np.array_equal(np.concatenate(list(pipeline)), expected)
    assert np.array_equal(np.stack(list(source.workers(0))), pixels)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_they_outlive_a_fork_and_the_store() -> None:
    """A fork closes the store's files in between; what was lent stays where it is."""
    pipeline = stoker.from_dataset(Rows("array"), seed=0).cache("64MiB").batch(4).workers(0)
    list(pipeline)
    batches = iter(pipeline)
    got = [next(batches)]
    child = os.fork()
    if not child:
        code = 1
        try:
            if all(np.array_equal(each[0], row(4 * at + 4)) for at, each in enumerate(batches)):
                code = 0
        finally:
            os._exit(code)
    got += batches
    assert os.WIFEXITED(os.waitpid(child, 0)[1])  # no signal; iterators do not go on in a child
    assert np.array_equal(np.concatenate(got), np.stack([row(i) for i in range(COUNT)]))
    del pipeline, batches
    assert np.array_equal(got[0][1], row(1))
