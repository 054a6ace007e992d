"""Items are found again by number, and each that is read is the caller's own."""

from __future__ import annotations

import mmap
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import counted, ended, forked

import stoker
from patience import wait_until
from stoker.analysis.probe.residency import drop, resident_pages
from stoker.basics import pytree
from stoker.basics.fingerprint import Fingerprint
from stoker.cache.example_cache import ExampleCache
from strategies import few

COUNT = 40


class Named(NamedTuple):
    row: np.ndarray
    number: int


def value_of(index: int) -> Any:
    """Return an example of one of many kinds."""
    rng = np.random.default_rng(index)
    kinds: list[Any] = [
        rng.integers(0, 256, (7, 5, 3), np.uint8),
        rng.random(3_000),  # of 24 KB: shares a block with others
        rng.random((3, 40_000), np.float32),  # has pages of its own
        rng.random((4, 6)).T,
        np.full(1 + index, index),  # as many shapes as examples
        np.array(index),
        np.zeros((0, 3), np.int16),
        np.array(["a", f"{index}"]),
        rng.bytes(2_000 + index),
        b"",
        f"text {index}",
        None,
        {"row": rng.random(9), "label": index},
        Named(rng.random(5), index),
    ]
    return kinds[index % len(kinds)]


def overwrite(value: Any) -> None:
    """Write to what the caller owns: the store must not change."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "uif":
        value[...] = 77
    elif isinstance(value, (dict, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            overwrite(each)


def cache_of(identity: str) -> ExampleCache:
    return ExampleCache(
        "1MiB", path=None, keep=False, identity=identity, describes="a test", examples=COUNT
    )


@few(20)
@given(st.lists(st.lists(st.integers(0, COUNT - 1), max_size=9), max_size=5))
def test_keys_of_numbers_are_those_of_their_fingerprints(asked: list[list[int]]) -> None:
    cache = cache_of("one")
    for numbers in asked:
        expected = [cache.key(Fingerprint(number), number) for number in numbers]
        assert cache.keys_of(np.array(numbers, np.int64)) == expected
        cache = pickle.loads(pickle.dumps(cache))  # as it reaches worker processes
        assert cache.keys_of(np.array(numbers, np.int64)) == expected
    every = np.arange(COUNT, dtype=np.int64)
    assert not {*cache.keys_of(every)} & {*cache_of("two").keys_of(every)}


class Kinds:
    def __init__(self) -> None:
        self.length = COUNT

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return value_of(index)


asked_many = st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=9), max_size=12)


@few(10)
@given(asked_many, st.booleans())
def test_values_are_those_of_the_dataset_however_often_they_are_read(
    queries: list[list[int]], one_by_one: bool
) -> None:
    cached = stoker.cached(Kinds(), "8MiB")
    asked = 0
    for numbers in queries * 2:
        found = [cached[n] for n in numbers] if one_by_one else cached.__getitems__(numbers)
        for number, value in zip(numbers, found, strict=True):
            assert pytree.equal(value, value_of(number))
            overwrite(value)
        asked += len(numbers)
        assert cached._cache.flush()
    counts = cached.cache_stats()
    assert counts.hits + counts.misses == asked
    assert counts.damaged == 0
    distinct = {number for numbers in queries for number in numbers}
    assert counts.items == len(distinct)
    if queries:
        assert counts.hits >= sum(map(len, queries))


def test_bytes_that_were_saved_count_the_same_by_either_way() -> None:
    cached = stoker.cached(Kinds(), "8MiB")
    saved = []
    for number in range(COUNT):
        cached[number]
    cached._cache.flush()
    for _ in range(3):
        before = cached.cache_stats().saved_bytes
        for number in range(COUNT):
            cached[number]
        saved.append(cached.cache_stats().saved_bytes - before)
    assert saved == saved[:1] * 3
    assert saved[0] == cached.cache_stats().payload_bytes


def test_numbers_that_are_no_plain_numbers_are_told_apart() -> None:
    class Strange(Kinds):
        def __getitem__(self, index: Any) -> Any:
            return np.array([index, COUNT], np.int64)

    cached = stoker.cached(Strange(), "8MiB")
    for _ in range(3):
        for index in (1, True, -1, np.int64(1), 0, False, -COUNT, COUNT + 3):
            assert cached[index].tolist() == [int(index), COUNT]
            assert [each[0] for each in cached.__getitems__([index, 2])] == [int(index), 2]
        cached._cache.flush()


def test_a_dataset_may_grow() -> None:
    data = Kinds()
    cached = stoker.cached(data, "8MiB")
    for length in (COUNT, 3 * COUNT):
        data.length = length
        for _ in range(3):
            found = cached.__getitems__(list(range(length)))
            assert all(pytree.equal(found[n], value_of(n)) for n in range(length))
            assert pytree.equal(cached[length - 1], value_of(length - 1))
            cached._cache.flush()


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_pipeline_leaves_out_what_a_filter_left_out(in_memory: bool, tmp_path: Path) -> None:
    place: dict[str, Any] = {} if in_memory else {"path": tmp_path, "keep": False}
    rows = [np.full(100, number) for number in range(COUNT)]
    pipeline = stoker.from_dataset(rows, seed=0).filter(lambda row: row[0] % 3 > 0)
    pipeline = pipeline.cache("8MiB", **place).shuffle().batch(5).workers(0)
    for _ in range(4):
        batches = list(pipeline)
        found = sorted(int(row[0]) for batch in batches for row in batch)
        assert found == [number for number in range(COUNT) if number % 3]
        for batch in batches:
            batch[:] = 77
    assert counted(pipeline).hits > 0  # how many depends on the thread that writes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_reads_on() -> None:
    cached = stoker.cached(Kinds(), "8MiB")
    numbers = list(range(COUNT))
    for _ in range(2):
        cached.__getitems__(numbers)
        cached._cache.flush()

    def reads_on() -> None:
        for _ in range(2):
            each = cached.__getitems__(numbers)
            assert all(pytree.equal(each[n], value_of(n)) for n in numbers)
            assert pytree.equal(cached[0], value_of(0))

    assert ended([forked(reads_on)]) == [0]
    assert all(pytree.equal(cached[n], value_of(n)) for n in numbers)


def resident(path: str) -> int:
    found = resident_pages(path)
    assert found is not None
    return found[0]


def test_what_comes_soon_is_read_from_the_disk_ahead_and_nothing_else(tmp_path: Path) -> None:
    """Its pages come into the page cache although nobody reads them."""
    cache = ExampleCache(
        "16MiB",
        path=tmp_path / "store",
        keep=False,
        identity="a test",
        describes="a test",
        examples=400,
    )
    numbers = np.arange(400)
    for key, number in zip(cache.keys_of(numbers), numbers.tolist(), strict=True):
        cache.offer(key, np.full(10_000, number % 251, np.uint8))
    assert cache.flush(60)
    assert [int(value[0]) for value in cache.find_numbered(numbers)] == (numbers % 251).tolist()
    assert cache._handle is not None
    store = cache._handle.store
    data = os.path.join(store.folder, "data.mdb")
    store.before_fork()  # LMDB's own map keeps pages, too
    store.after_fork()
    store.map.obj.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    drop(data)
    before = resident(data)
    if before > 200:
        pytest.skip("this file system keeps its pages")
    some = numbers[::20]
    cache.read_ahead(some)
    wait_until(lambda: resident(data) >= before + len(some) * 10_000 // mmap.PAGESIZE)
    assert [int(value[0]) for value in cache.find_numbered(some)] == (some % 251).tolist()
    assert resident(data) <= before + len(some) * (10_000 // mmap.PAGESIZE + 3)
