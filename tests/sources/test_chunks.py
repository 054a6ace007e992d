"""Rows of tables in many chunks, joined or not, are those that Arrow says they are.

Batches that are gathered from sources are those that batching their rows gives.
"""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_tables import KINDS, plain
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.sources.arrow.table import TableSource
from strategies import few, one_in


@st.composite
def chunks_of(draw: st.DrawFn, kind: pa.DataType, values: Any, rows: int) -> pa.ChunkedArray:
    """Chunks anywhere in their buffers; nulls in some of them; some of them empty."""
    with_nulls = st.none() | values
    cuts = sorted([0, rows, *draw(st.lists(st.integers(0, rows), max_size=4))])
    chunks = []
    for begin, end in itertools.pairwise(cuts):
        size, before, behind = end - begin, draw(st.integers(0, 9)), draw(st.integers(0, 2))
        from_ = with_nulls if draw(st.booleans()) else values
        drawn = draw(st.lists(from_, min_size=size, max_size=size))
        filled = draw(st.lists(with_nulls, min_size=before + behind, max_size=before + behind))
        whole = pa.array([*filled[:before], *drawn, *filled[before:]], kind)
        chunks.append(whole.slice(before, size))
    return pa.chunked_array(chunks, kind)


@st.composite
def tables(draw: st.DrawFn, kinds: Any = tuple(KINDS)) -> pa.Table:
    """A table with the number of each row, whose columns have chunks of their own."""
    rows = draw(st.integers(1, 40))
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3, unique=True))
    columns = {name: draw(chunks_of(*KINDS[name], rows)) for name in names}
    if "fixed list" in names and draw(st.booleans()):
        columns["tensor"] = tensors(columns["fixed list"])
    return pa.table({"n": np.arange(rows), **columns})


def tensors(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return lists of three as arrays of shape [1, 3]."""
    kind = pa.fixed_shape_tensor(pa.float64(), [1, 3])
    each = [pa.ExtensionArray.from_storage(kind, chunk) for chunk in column.chunks]
    return pa.chunked_array(each, kind)


def expected(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows, by Arrow."""
    if "tensor" in table.column_names:
        at = table.column_names.index("tensor")
        chunks = [chunk.storage for chunk in table["tensor"].chunks]
        lists = pa.chunked_array(chunks, pa.list_(pa.float64(), 3)).to_pylist()
        kind = pa.list_(pa.list_(pa.float64()))
        table = table.set_column(
            at, "tensor", pa.array([None if one is None else [one] for one in lists], kind)
        )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@pytest.fixture(params=["joined", "apart"])
def _memory(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With much memory small chunks are joined, with none they are not."""
    usable = 1 << 40 if request.param == "joined" else 0
    monkeypatch.setattr("stoker.sources.arrow.rows.usable_memory_bytes", lambda: usable)


def outcome(pipeline: Any) -> tuple[list[Any], str]:
    """Return the batches of an epoch, with their dtypes, and the error that ended it."""
    batches: list[Any] = []
    try:
        for batch in pipeline:
            batches += [
                {
                    name: (column.dtype, column.tolist()) if isinstance(column, np.ndarray)
                    else column
                    for name, column in batch.items()
                }
            ]  # fmt: skip
    except stoker.StageError as error:
        return batches, str(error)
    return batches, ""


def test_it_is_said_whether_chunks_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"n": pa.chunked_array([[1, 2], [3]])})
    assert "in 2 chunks of 24 B, which are joined" in str(stoker.from_table(table))
    monkeypatch.setattr("stoker.sources.arrow.rows.usable_memory_bytes", lambda: 0)
    assert "joined" not in str(stoker.from_table(table))


@pytest.mark.usefixtures("_memory")
@few(30)
@given(table=tables())
def test_examples_are_rows(table: pa.Table) -> None:
    rows = expected(table)
    examples = list(stoker.from_table(table, seed=0).shuffle())
    assert len(examples) == len(rows)
    for example in examples:
        found = {name: plain(value) for name, value in example.items()}
        assert found == rows[int(example["n"])]


@pytest.mark.usefixtures("_memory")
@few(30)
@given(
    table=tables(),
    size=st.integers(1, 20),
    workers=st.sampled_from([0, 2]),
)
def test_batches_are_collated_rows(table: pa.Table, size: int, workers: int) -> None:
    """The same values and dtypes as of examples that are batched one by one, to the same error.

    Of two things that are wrong with a batch, which one is told depends on how it is divided.
    """
    whole = stoker.from_table(table, seed=0).shuffle()
    gathered, error = outcome(whole.batch(size).workers(workers))
    by_rows, its_error = outcome(whole.map(dict).batch(size).workers(0))
    assert repr(gathered) == repr(by_rows)
    assert error.partition(":")[0].split(",")[0] == its_error.partition(":")[0].split(",")[0]


@pytest.mark.usefixtures("_memory")
@few(20)
@given(
    table=tables(["int64", "string", "view", "large bytes", "even list", "fixed list", "bool"]),
    size=st.integers(1, 9),
)
def test_batches_of_files_are_collated_rows(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, size: int
) -> None:
    file = tmp_path_factory.mktemp("rows") / "a.parquet"
    pq.write_table(table, file, row_group_size=7)
    whole = stoker.from_parquet(file, seed=0).shuffle().workers(0)  # they blame the same row
    gathered = outcome(whole.batch(size))
    assert repr(gathered) == repr(outcome(whole.map(dict).batch(size)))


def test_lists_of_one_length_become_one_array() -> None:
    lists = pa.chunked_array([[[n, n + 1] for n in range(at, at + 5)] for at in (0, 5, 10)])
    for batch in stoker.from_table(pa.table({"x": lists}), seed=0).shuffle().batch(4):
        assert batch["x"].shape == (len(batch["x"]), 2)
        assert (batch["x"][:, 1] == batch["x"][:, 0] + 1).all()
        batch["x"][...] = -1
    assert lists.to_pylist()[14] == [14, 15]


LEAVES: dict[str, tuple[pa.DataType, Any]] = {
    "uint8": (pa.uint8(), lambda n: n % 251),
    "int64": (pa.int64(), lambda n: n - 2**40),
    "float16": (pa.float16(), lambda n: np.float16(n % 99)),
    "float32": (pa.float32(), lambda n: n / 4),
    "float64": (pa.float64(), lambda n: n / 3),
    "bool": (pa.bool_(), lambda n: n % 3 == 0),
    "text": (pa.string(), lambda n: f"é{n}"),
    "nested": (pa.list_(pa.int16()), lambda n: [n % 9] * (n % 3)),
}


@pytest.mark.parametrize("length", one_in(3, [65, 63, 64, 512, 4_096]))
@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_lists_of_any_length(tmp_path: Path, leaf: str, length: int) -> None:
    """Ragged, of a length that the type does not fix, and of one that it does; from any source."""
    import datasets

    kind, value = LEAVES[leaf]
    even = [[value(row + n) for n in range(length)] for row in range(4)]
    columns = {
        "even": pa.array(even, pa.list_(kind)),
        "fixed": pa.array(even, pa.list_(kind, length)),
        "ragged": pa.array([each[row:] for row, each in enumerate(even)], pa.large_list(kind)),
    }
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    chunks = pa.concat_tables([table.slice(0, 3), table.slice(3)])
    rows, rows_of = table.to_pylist(), table.to_pydict()
    for source in (
        stoker.from_table(table),
        stoker.from_table(chunks),
        stoker.from_parquet(tmp_path / "a.parquet"),
        stoker.from_huggingface(datasets.Dataset(chunks)),
    ):
        assert [plain(row) for row in source] == rows
    if leaf in ("text", "nested"):
        return
    table = chunks.drop_columns("ragged")
    for gathered in (
        stoker.from_table(table),
        stoker.from_parquet(tmp_path / "a.parquet", table.column_names),
        stoker.from_huggingface(datasets.Dataset(table)),
    ):
        (batch,) = gathered.batch(4)
        for found in batch.values():
            assert found.dtype == kind.to_pandas_dtype()
            assert found.tolist() == rows_of["even"]


def test_buffers_that_begin_anywhere_are_read() -> None:
    """Those of other libraries need not be aligned."""
    memory = np.zeros(8 * 10 + 3, np.uint8)
    values = memory[3:].view(np.uint8)
    values[:] = np.arange(10, dtype=np.int64).view(np.uint8)
    odd = pa.Array.from_buffers(pa.int64(), 10, [None, pa.py_buffer(values)])
    ends = memory.copy()[3 : 3 + 44]
    ends[:] = np.arange(0, 22, 2, dtype=np.int32).view(np.uint8)
    texts = pa.Array.from_buffers(
        pa.string(), 10, [None, pa.py_buffer(ends), pa.py_buffer(b"0a1a2a3a4a5a6a7a8a9a")]
    )
    table = pa.table({"n": pa.chunked_array([odd, odd]), "s": pa.chunked_array([texts, texts])})
    for batch in stoker.from_table(table, seed=0).shuffle().batch(4):
        assert [f"{n}a" for n in batch["n"]] == batch["s"]


def test_offsets_that_lead_elsewhere_are_refused() -> None:
    """A file may say anything of its texts."""
    ends = np.array([0, 1 << 30, 4], np.int32)
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(ends), pa.py_buffer(b"abcd")]
    )
    train = stoker.from_table(pa.table({"s": broken}))
    with pytest.raises(stoker.StageError, match="a column of string is damaged"):
        list(train.batch(2))


def test_of_a_file_of_arrow_that_is_mapped(tmp_path: Path) -> None:
    table = pa.table(
        {"n": pa.array(range(3_000), pa.int32()), "s": [f"row {n}" for n in range(3_000)]}
    )
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=100)
    with pa.memory_map(str(tmp_path / "a.arrow")) as source:
        mapped = pa.ipc.open_file(source).read_all()
    for batch in stoker.from_table(mapped, seed=0).shuffle().batch(64):
        assert [f"row {n}" for n in batch["n"]] == batch["s"]


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
def test_of_a_file_that_has_changed(tmp_path: Path, workers: int) -> None:
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


@pytest.mark.parametrize("with_text", [False, True])
def test_of_a_mixture(with_text: bool) -> None:
    parts: list[stoker.Pipeline[Any]] = []
    for seed in range(2):
        table = pa.table({"n": np.arange(100 * seed, 100 * seed + 30)})
        if with_text:
            table = table.append_column("s", pa.array([f"{n}" for n in range(30)]))
        parts.append(stoker.from_table(table, seed=seed).shuffle())
    gathered, by_rows = (stoker.mix(parts, weights=[1, 2], seed=3) for _ in range(2))
    assert outcome(gathered.batch(7)) == outcome(by_rows.map(dict).batch(7))


def test_of_nulls_over_bytes_that_are_no_text() -> None:
    rows = 40
    valid = np.packbits(np.arange(rows) % 2 == 0, bitorder="little").tobytes()
    ends = np.arange(rows + 1, dtype=np.int32).tobytes()
    parts = [pa.py_buffer(each) for each in (valid, ends, b"a\xff" * (rows // 2))]
    table = pa.table({"s": pa.Array.from_buffers(pa.string(), rows, parts)})
    for size in (5, 40):
        (texts,) = zip(*[b.values() for b in stoker.from_table(table).batch(size)], strict=True)
        assert [text for batch in texts for text in batch] == ["a", None] * (rows // 2)
