"""Batches that are gathered from tables are those that batching their rows gives."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.sources.arrow.table import TableSource

COLUMNS = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint8": st.integers(0, 255),
    "float32": st.floats(width=32, allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(max_size=5) | st.none(),
    "large_string": st.text(max_size=5),
    "binary": st.binary(max_size=5),
    "large_binary": st.binary(max_size=5) | st.none(),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Tables in chunks that begin anywhere in their buffers."""
    rows = draw(st.integers(1, 60))
    kinds = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4))
    columns = {
        f"{kind} {n}": pa.array(
            draw(st.lists(COLUMNS[kind], min_size=rows, max_size=rows)),
            getattr(pa, kind)() if kind != "bool" else pa.bool_(),
        )
        for n, kind in enumerate(kinds)
    }
    whole = pa.table(columns)
    cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    return pa.concat_tables([whole.slice(a, b - a) for a, b in itertools.pairwise(cuts)])


def of_rows(batches: Any) -> list[dict[str, Any]]:
    """Return the rows of batches, as Python's values."""
    found = []
    for batch in batches:
        columns = [
            column.tolist() if isinstance(column, np.ndarray) else column
            for column in batch.values()
        ]
        found += [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
    return found


def kinds_of(batch: dict[str, Any]) -> list[Any]:
    return [getattr(column, "dtype", type(column)) for column in batch.values()]


@pytest.mark.full
@given(tables(), st.integers(1, 40), st.booleans(), st.booleans())
def test_of_tables(table: pa.Table, size: int, drop_last: bool, shuffled: bool) -> None:
    whole = stoker.from_table(table, seed=0)
    whole = whole.shuffle() if shuffled else whole
    gathered = whole.batch(size, drop_last=drop_last)
    by_rows = whole.map(dict).batch(size, drop_last=drop_last)
    batches, others = list(gathered), list(by_rows)
    assert of_rows(batches) == of_rows(others)
    assert list(map(kinds_of, batches)) == list(map(kinds_of, others))
    stop = len(table) // size * size if drop_last else len(table)
    if not shuffled:
        assert of_rows(batches) == table.slice(0, stop).to_pylist()


def test_examples_and_batches_hold_nothing_of_the_table() -> None:
    table = pa.table({"number": np.arange(6), "data": [bytes([n]) for n in range(6)]})
    for batch in stoker.from_table(table, seed=0).batch(3):
        batch["number"][:] = -1
    assert [each["number"] for each in stoker.from_table(table, seed=0)] == list(range(6))
    assert table["number"].to_pylist() == list(range(6))


def test_pickles_without_its_parts() -> None:
    source = TableSource(pa.table({"number": np.arange(1000)}))
    before = len(pickle.dumps(source))
    source.fetch([1])
    assert len(pickle.dumps(source)) == before
    (example,) = pickle.loads(pickle.dumps(source)).fetch([7])
    assert example == {"number": 7}


@pytest.mark.parametrize("with_null", [False, True])
def test_of_parquet(tmp_path: Path, with_null: bool) -> None:
    numbers = [None if with_null and n == 33 else n for n in range(50)]
    table = pa.table({"n": pa.array(numbers, pa.int32()), "s": [f"é{n}" for n in range(50)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    train = stoker.from_parquet(tmp_path / "a.parquet", seed=0).shuffle().batch(8)
    if with_null:
        with pytest.raises(stoker.StageError, match="'n' differs within a batch"):
            list(train)
        return
    rows = of_rows(train)
    again = stoker.from_parquet(tmp_path / "a.parquet", seed=0).shuffle().map(dict).batch(8)
    assert rows == of_rows(again)
    assert sorted(rows, key=lambda row: row["n"]) == table.to_pylist()


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_changed_file(tmp_path: Path, workers: int) -> None:
    """The batches before it come out, and the error names the row."""
    tables = [pa.table({"n": np.arange(100 * n, 100 * n + 50)}) for n in range(2)]
    for n, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"{n}.parquet", row_group_size=10)
    train = stoker.from_parquet(tmp_path, seed=0).batch(20).workers(workers)
    pq.write_table(tables[0], tmp_path / "1.parquet", row_group_size=5)
    batches = iter(train)
    seen = [next(batches)["n"].tolist() for _ in range(2)]
    with pytest.raises(stoker.StageError, match=r"1\.parquet, row 0.* has changed") as raised:
        next(batches)
    batches.close()
    assert raised.value.index == 50
    assert seen == [list(range(20)), list(range(20, 40))]


class Failing:
    """Rows that are sliced; those from one on cannot be read."""

    shape, dtype = (4_000, 2), np.dtype(np.float32)

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __getitem__(self, rows: Any) -> np.ndarray:
        wanted = np.arange(self.shape[0])[rows]
        if len(wanted) and wanted.max() >= self.bad:
            raise OSError("disk")
        return np.repeat(wanted[:, None], 2, 1).astype(np.float32)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("bad", [3, 1_607])
def test_a_row_that_cannot_be_read_fails_its_own_batch(bad: int, workers: int) -> None:
    batches = iter(stoker.from_arrays(Failing(bad), seed=0).batch(5).workers(workers))
    for number in range(bad // 5):
        assert next(batches)[:, 1].tolist() == list(range(5 * number, 5 * number + 5))
    with pytest.raises(stoker.StageError, match="OSError: disk") as caught:
        next(batches)
    assert caught.value.index == bad


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_in_the_middle(tmp_path: Path, workers: int) -> None:
    pq.write_table(pa.table({"n": np.arange(60)}), tmp_path / "a.parquet", row_group_size=9)

    def build() -> stoker.Pipeline[Any]:
        train = stoker.from_parquet(tmp_path / "a.parquet", seed=3).shuffle().batch(8)
        return train.workers(workers)

    train = build()
    batches = iter(train)
    seen = [next(batches)["n"].tolist() for _ in range(3)]
    state = train.state_dict()
    batches.close()
    resumed = build()
    resumed.load_state_dict(state)
    rest = [batch["n"].tolist() for batch in resumed]
    assert seen + rest == [batch["n"].tolist() for batch in build()]


def test_of_a_mixture() -> None:
    numbers = pa.table({"n": np.arange(30)})
    others = pa.table({"n": np.arange(100, 130)})
    for with_text in (False, True):
        parts = [
            table.append_column("s", pa.array([f"{n}" for n in range(30)])) if with_text else table
            for table in (numbers, others)
        ]

        def mixed(parts: list[pa.Table] = parts) -> stoker.Pipeline[Any]:
            each = [stoker.from_table(part, seed=n).shuffle() for n, part in enumerate(parts)]
            return stoker.mix({each[0]: 1, each[1]: 2}, seed=3)

        assert of_rows(mixed().batch(7)) == of_rows(mixed().map(dict).batch(7))


def test_of_nulls_over_bytes_that_are_no_text() -> None:
    rows = 40
    valid = np.packbits(np.arange(rows) % 2 == 0, bitorder="little").tobytes()
    ends = np.arange(rows + 1, dtype=np.int32).tobytes()
    parts = [pa.py_buffer(each) for each in (valid, ends, b"a\xff" * (rows // 2))]
    table = pa.table({"s": pa.Array.from_buffers(pa.string(), rows, parts)})
    for size in (5, 40):
        (texts,) = zip(*[b.values() for b in stoker.from_table(table).batch(size)], strict=True)
        assert [text for batch in texts for text in batch] == ["a", None] * (rows // 2)


def test_of_views_of_text_in_parquet(tmp_path: Path) -> None:
    texts = ["a", None, "c" * 40]
    table = pa.table({"s": pa.array(texts, pa.string_view())})
    pq.write_table(table, tmp_path / "a.parquet")
    read = stoker.from_parquet(tmp_path / "a.parquet", seed=0)
    assert [example["s"] for example in read] == texts
    assert [batch["s"] for batch in read.batch(3)] == [texts]
