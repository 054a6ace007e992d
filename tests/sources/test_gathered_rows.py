"""Batches that are gathered from tables are those that batching their rows gives."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stoker
from stoker.sources.arrow.table import TableSource


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
    """Rows that are sliced; one cannot be read."""

    shape, dtype = (4_000, 2), np.dtype(np.float32)

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __getitem__(self, rows: Any) -> np.ndarray:
        wanted = np.arange(self.shape[0])[rows]
        if self.bad in wanted:
            raise OSError("disk")
        return np.repeat(wanted[:, None], 2, 1).astype(np.float32)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("bad", [3, 1_607])
def test_a_row_that_cannot_be_read_fails_its_own_batch(bad: int, workers: int) -> None:
    batches = iter(stoker.from_arrays(Failing(bad), seed=0).batch(5).workers(workers))
    for number in range(800):
        if number == bad // 5:
            with pytest.raises(OSError, match="OSError: disk") as caught:
                next(batches)
            assert isinstance(caught.value, stoker.StageError)
            assert caught.value.index == bad
        else:
            assert next(batches)[:, 1].tolist() == list(range(5 * number, 5 * number + 5))


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
            return stoker.mix([each[0], each[1]], weights=[1, 2], seed=3)

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
