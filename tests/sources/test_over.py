"""Sources over others: one after another, paired, and what labels they have."""

from __future__ import annotations

import itertools
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.basics.buffers import Recycler
from stoker.sources.over import ConcatSource
from stoker.testing import check_resume
from strategies import few, stream


def arrays(*lengths: int) -> list[stoker.Pipeline[Any]]:
    starts = itertools.accumulate(lengths, initial=0)
    return [
        stoker.from_arrays(np.arange(start, start + length))
        for start, length in zip(starts, lengths, strict=False)
    ]


@settings(few(15))
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), world=st.integers(1, 3))
def test_joined_sources_are_as_one(lengths: list[int], world: int) -> None:
    one = stoker.from_dataset(np.arange(sum(lengths)), seed=5).shuffle()
    for rank in range(world):
        joined = stoker.concat(arrays(*lengths), seed=5).shuffle()
        each = [
            p.shard(rank=rank, world_size=world, remainder="uneven").batch(4) for p in (one, joined)
        ]
        assert stream(each[1]) == stream(each[0])


def test_joined_sources_of_all_kinds(tmp_path: Path) -> None:
    rows = [{"x": n, "text": "a" * n} for n in range(30)]
    table = pa.Table.from_pylist(rows[10:20])
    pq.write_table(pa.Table.from_pylist(rows[20:]), tmp_path / "a.parquet", row_group_size=4)

    def build() -> Any:
        sources = [
            stoker.from_dataset(rows[:10]),
            stoker.from_table(table),
            stoker.from_parquet(f"file://{tmp_path}/a.parquet"),
        ]
        return stoker.concat(sources, seed=1).shuffle().echo(2).batch(5)

    found = [int(row["x"]) for row in stoker.concat([stoker.from_table(table)] * 2)]
    assert found == [*range(10, 20)] * 2
    assert sorted(int(x) for batch in build() for x in batch["x"]) == sorted([*range(30)] * 2)
    check_resume(build, every=3)
    with pytest.raises(stoker.StageError, match="IndexError"):
        list(stoker.concat([stoker.from_dataset(Short(3)), *arrays(2)]))


class Short(list[int]):
    """A list that loses its last item when the first one is read."""

    def __init__(self, length: int) -> None:
        super().__init__(range(length))

    def __getitem__(self, index: Any) -> Any:
        if len(self) > 2:
            self.pop()
        return super().__getitem__(index)


def test_a_dataset_that_became_shorter_is_told_so() -> None:
    data = stoker.from_dataset(Short(3)).workers(0)
    with pytest.raises(stoker.StageError, match="had 3 examples when the epoch began, 2 now"):
        list(data)


class Asked:
    """Tells how often it was asked before, and fails once: then it may be half changed."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.times += 1
        if index == 3:
            raise OSError(index)
        return self.times


OVER: list[Any] = [
    lambda p, at: stoker.concat([p], max_errors=1),
    lambda p, at: stoker.concat([*arrays(2), p, *arrays(3)], max_errors=1).skip(2).take(6),
    lambda p, at: stoker.mix([p], max_errors=1),
    lambda p, at: stoker.zip(p, *arrays(6), max_errors=1).map(operator.itemgetter(0)),
    lambda p, at: stoker.zip(p, remote(at, 6), max_errors=1).map(operator.itemgetter(0)),
    lambda p, at: stoker.concat([p, remote(at, 2)], max_errors=1).take(6),
    lambda p, at: (
        stoker.zip(p, remote(at, 6), max_errors=1).with_index("n").map(lambda example: example[0])
    ),
]


def remote(folder: Path, length: int) -> stoker.Pipeline[Any]:
    """Files that are read ahead."""
    for number in range(length):
        (folder / f"{number}.bin").write_bytes(b"x")
    return stoker.from_files(f"file://{folder}/*.bin").with_index("n")


@stoker.thread_safe
class LeavesOut(stoker.Source[int]):
    """Gives fewer examples than it is asked for, where example 2 is among them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return 100 + index

    def fetch(self, indices: Any) -> list[int]:
        return [100 + int(index) for index in indices if index != 2]


class Several(list[int]):
    """Is asked for several at once."""

    most = 0

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.most = max(self.most, len(indices))
        return [*indices]


def test_parts_that_give_several_at_once_are_asked_for_several() -> None:
    data = Several(range(6))
    plain = stoker.from_dataset([*range(6)])
    for made in (
        stoker.zip(stoker.from_dataset(data), plain),
        stoker.concat([stoker.from_dataset(data), plain]),
    ):
        data.most = 0
        (first, *_) = list(made.batch(6).workers(0))
        assert np.asarray(first).ravel().tolist()[:6] == [*range(6)]
        assert data.most > 1


@pytest.mark.parametrize("over", ["concat", "zip"])
def test_a_part_that_gives_too_few_is_an_error_of_one_example(over: str) -> None:
    parts = [stoker.from_dataset(LeavesOut()), stoker.from_dataset([*range(6)])]
    made: Any = (
        stoker.concat(parts, max_errors=1) if over == "concat" else stoker.zip(*parts, max_errors=1)
    )
    taken = [each if over == "concat" else each[0] for each in made.take(6).workers(0)]
    assert [int(each) for each in taken] == [100, 101, 103, 104, 105]


@pytest.mark.parametrize("over", OVER)
def test_a_dataset_is_asked_once_for_each_example_whatever_it_raises(
    over: Any, tmp_path: Path
) -> None:
    data = Asked()
    (batch,) = over(stoker.from_dataset(data), tmp_path).batch(6).workers(0)
    assert [int(each) for each in batch] == [1, 2, 3, 5, 6]


def test_more_parts_than_two_bytes_count() -> None:
    row: Any = stoker.from_arrays(np.zeros(1, int)).chain.source
    last: Any = stoker.from_arrays(np.array([7])).chain.source
    joined: Any = ConcatSource([*[row] * 65_536, last])
    assert joined.fetch([65_536, 0]) == [7, 0]
    rows = joined.rows
    batch = rows.allocate(2, Recycler())
    rows.gather(np.array([65_536, 0]), batch, 0)
    assert batch.tolist() == [7, 0]


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_images_and_their_masks(tmp_path: Path, protocol: str) -> None:
    for folder, suffix in (("images", "jpg"), ("masks", "png")):
        (tmp_path / folder).mkdir()
        for n in range(12):
            (tmp_path / folder / f"{n:02}.{suffix}").write_bytes(f"{folder} {n}".encode())

    def build(workers: int = 0) -> Any:
        pairs = stoker.zip(
            stoker.from_files(f"{protocol}{tmp_path}/images/*.jpg"),
            stoker.from_files(f"{tmp_path}/masks/*.png"),
            seed=2,
        )
        shuffled = pairs.shuffle().map(lambda pair: (pair[0].data, pair[1].data))
        return shuffled.cache("1MiB").batch(4, collate=list).workers(workers)

    pairs = [pair for batch in build() for pair in batch]
    assert sorted(pairs) == sorted((b"images %d" % n, b"masks %d" % n) for n in range(12))
    assert stream(build()) == stream(build(2))
    check_resume(build, every=1)
    (tmp_path / "masks" / "12.png").write_bytes(b"one more")
    with pytest.raises(ValueError, match=r"images/\*\.jpg'\) has 12 and .*masks/\*\.png'\) 13"):
        build()


def test_what_cannot_be_joined_or_paired() -> None:
    a, b = arrays(4, 4)
    for wrong, says in (
        (a.map(lambda x: x), r"part 1, from_arrays.* has \.map\(.*\), which belongs behind"),
        (a.shuffle(), r"has \.shuffle"),
        (a.steps(2), r"has \.steps"),
        (stoker.from_dataset([1], max_errors=1), "has max_errors="),
        (stoker.from_iterable([1]), "no examples with numbers"),
        (stoker.mix([a, b]), "is a mixture"),
    ):
        for call in (lambda p: stoker.concat([p, b]), lambda p: stoker.zip(p, b)):
            with pytest.raises(ValueError, match=says):
                call(wrong)
    joined: Any = stoker.concat
    for given_ in (a, [a, 1], {a: 1}):
        with pytest.raises(TypeError, match="takes pipelines, as in"):
            joined(given_)
    with pytest.raises(ValueError, match=r"seeds 1, 2, .* for all: zip\(\.\.\., seed=\)"):
        stoker.zip(stoker.from_arrays(np.arange(4), seed=1), stoker.from_dataset([1] * 4, seed=2))


def test_labels_are_known_without_reading(tmp_path: Path) -> None:
    for name, count in (("cat", 3), ("dog", 2)):
        (tmp_path / name).mkdir()
        for n in range(count):
            (tmp_path / name / f"{n}.jpg").write_bytes(b"")
    kinds = [*"abcab"]
    table = pa.table({"kind": kinds, "n": range(5)})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    for path in (str(tmp_path), f"file://{tmp_path}"):
        photos = stoker.from_folder(path)
        assert photos.labels().tolist() == [0, 0, 0, 1, 1]
        assert photos.with_index().labels("label").tolist() == [0, 0, 0, 1, 1]
    assert stoker.concat([photos, photos]).labels().tolist() == [0, 0, 0, 1, 1] * 2
    for source in (stoker.from_table(table), stoker.from_parquet(tmp_path / "t.parquet")):
        assert source.labels("kind").tolist() == kinds
        with pytest.raises(TypeError, match="name the field"):
            source.labels()
        with pytest.raises(LookupError, match="no field 'other'"):
            source.labels("other")
    with pytest.raises(ValueError, match="labels"):
        stoker.from_iterable([1]).labels()
    one, other = photos.split(0.5, stratify="label")
    assert {e.label for e in one} == {e.label for e in other} == {0, 1}
