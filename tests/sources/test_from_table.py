"""Tables in memory and in Parquet files."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from arrow_tables import KINDS, plain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume
from strategies import few, frozen, stream

IN_FILES = sorted(set(KINDS) - {"half", "view", "nothing"})


@st.composite
def tables(draw: st.DrawFn) -> Any:
    rows = draw(st.integers(1, 12))
    columns = {}
    for name in draw(st.lists(st.sampled_from(IN_FILES), min_size=1, unique=True)):
        kind, values = KINDS[name]
        values = st.none() | values if draw(st.booleans()) else values
        drawn = draw(st.lists(values, min_size=rows, max_size=rows))
        columns[name] = pa.array(drawn, kind)
    return pa.table(columns)


@settings(few(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    table=tables(), group=st.integers(1, 6), cut=st.integers(0, 12), limit=st.sampled_from([0, 1e9])
)
def test_rows_of_files_are_examples_in_order(
    tmp_path: Path, table: Any, group: int, cut: int, limit: float
) -> None:
    parts = table.slice(0, cut), table.slice(cut)
    paths = [tmp_path / f"{n}.parquet" for n in range(2)]
    for path, part in zip(paths, parts, strict=True):
        pq.write_table(part, path, row_group_size=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker.sources.arrow.parquet.usable_memory_bytes", lambda: limit)
        train = stoker.from_parquet(paths)
    assert [plain(example) for example in train] == table.to_pylist()
    name = table.column_names[-1]
    only = stoker.from_parquet(tmp_path / "{0,1}.parquet", [name])
    assert [plain(example) for example in only] == table.select([name]).to_pylist()


@few(12)
@given(table=tables(), data=st.data())
def test_an_example_does_not_depend_on_what_is_read_with_it(table: Any, data: Any) -> None:
    ragged = pa.list_(pa.list_(pa.int16()))
    rows = st.lists(st.none() | st.lists(st.integers(0, 9), max_size=2), max_size=2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(4 * len(table)).reshape(-1, 2, 2)
    )
    there = pa.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))))
    more = {
        "ragged": pa.array(
            data.draw(st.lists(rows, min_size=len(table), max_size=len(table))), ragged
        ),
        "holes": pa.array([[1, None] if n % 3 else [n] for n in range(len(table))]),
        "tensor": pa.ExtensionArray.from_storage(
            tensors.type, pc.if_else(there, tensors.storage, None)
        ),
    }
    for name, column in more.items():
        table = table.append_column(name, column)
    (together,) = stoker.from_table(table).batch(
        len(table), collate=stoker.thread_safe(lambda rows: [*map(frozen, rows)])
    )
    alone = [frozen(next(iter(stoker.from_table(table.slice(n, 1))))) for n in range(len(table))]
    assert together == alone


def test_lists_of_lists_are_arrays_each_by_itself() -> None:
    kind = pa.list_(pa.list_(pa.int8()))
    lists = pa.array([[[1, 2], [3, 4]], [[1], [2, 3]], [], None, [[1, None]]], kind)
    square, ragged, empty, null, holes = (
        each["x"] for each in stoker.from_table(pa.table([lists], ["x"]))
    )
    assert square.dtype == empty.dtype == np.int8
    assert square.tolist() == [[1, 2], [3, 4]]
    assert [each.tolist() for each in ragged] == [[1], [2, 3]]
    assert empty.shape == (0, 0)
    assert null is None
    assert holes == [[1, None]]


def test_views_of_text_are_text() -> None:
    columns = {
        "text": pa.array(["a", None, "c" * 40], pa.string_view()),
        "bytes": pa.array([b"a", b"b", b"c" * 40], pa.binary_view()),
        "list": pa.array([["x"], [], None], pa.large_list(pa.string_view())),
        "struct": pa.array([{"k": "v"}, {"k": None}, None], pa.struct({"k": pa.string_view()})),
    }
    table = pa.table(columns)
    assert list(stoker.from_table(table)) == table.to_pylist()


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_of_a_folder_each_file_is_read_once_and_what_is_aside_is_not(
    tmp_path: Path, protocol: str
) -> None:
    for name in ("a", "sub/b", "key=1/c", "_temporary/0/a", "_delta_log/1", ".hidden/d", "_e"):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [name]}), tmp_path / "x" / f"{name}.parquet")
    if not protocol:  # fsspec lists no folder twice
        (tmp_path / "x" / "again").symlink_to(tmp_path / "x")
    train = stoker.from_parquet(f"{protocol}{tmp_path}/x")
    assert sorted(row["n"] for row in train) == ["a", "key=1/c", "sub/b"]


def test_a_pattern_may_mean_folders(tmp_path: Path) -> None:
    (tmp_path / "b.parquet").mkdir()  # as Spark writes them
    for number, name in enumerate(("a", "b.parquet/0", "b.parquet/1")):
        pq.write_table(numbers(2, 2 * number), tmp_path / f"{name}.parquet")
    for pattern in ("*.parquet", "**/*.parquet", "{a,b}.parquet"):
        assert [row["id"] for row in stoker.from_parquet(tmp_path / pattern)] == [*range(6)]


def numbers(count: int, first: int = 0) -> Any:
    ids = np.arange(first, first + count)
    x = pa.array(np.repeat(ids[:, None], 3, 1).tolist(), pa.list_(pa.float32()))
    return pa.table({"id": ids, "x": x})


def test_arrays_belong_to_the_example_and_may_be_written_to(tmp_path: Path) -> None:
    pq.write_table(numbers(10), tmp_path / "a.parquet")

    def spoilt(x: Any) -> Any:
        assert x.dtype == np.float32
        x += 100
        return x

    train = stoker.from_parquet(tmp_path / "a.parquet").map(spoilt, on="x").batch(5)
    for _ in range(2):
        assert [batch["x"][:, 0].tolist() for batch in train] == [
            [100, 101, 102, 103, 104],
            [105, 106, 107, 108, 109],
        ]


@settings(few(3), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), table=st.booleans())
def test_resumes_anywhere_and_is_the_same_for_any_workers(
    tmp_path: Path, counts: list[int], table: bool
) -> None:
    parts = [numbers(count, 10 * n) for n, count in enumerate(counts)]
    for n, part in enumerate(parts):
        pq.write_table(part, tmp_path / f"{n}.parquet", row_group_size=4)
    paths = [tmp_path / f"{n}.parquet" for n in range(len(parts))]

    def build(workers: int = 0) -> stoker.Pipeline:
        if table:
            source = stoker.from_table(pa.concat_tables(parts), seed=3)
        else:
            source = stoker.from_parquet(paths, seed=3)
        return source.shuffle().batch(4).workers(workers)

    check_resume(build)
    assert stream(build(0)) == stream(build(3))


def test_each_row_group_is_read_once_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(numbers(60), tmp_path / "a.parquet", row_group_size=10)
    read: list[int] = []
    plainly = pq.ParquetFile.read_row_group

    def counted(self: Any, number: int, **how: Any) -> Any:
        read.append(number)
        return plainly(self, number, **how)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    train = stoker.from_parquet(tmp_path, seed=0).shuffle().batch(4).workers(3)
    assert "60 examples in 6 row groups" in str(train)
    assert len(list(train)) == len(list(train)) == 15
    assert sorted(read) == list(range(6))


def test_reading_row_groups_again_and_again_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(numbers(400), tmp_path / "a.parquet", row_group_size=100)
    monkeypatch.setattr("stoker.sources.arrow.parquet.usable_memory_bytes", lambda: 0)
    train = stoker.from_parquet(tmp_path, seed=0).shuffle().workers(0)
    with pytest.warns(
        UserWarning, match=r"rows are read for each one that is used.*\.cache\("
    ) as told:
        assert len(list(train)) == 400
    assert len(told) == 1


def test_dataframes_by_their_protocols() -> None:
    import pandas  # type: ignore[import-untyped]

    frame = pandas.DataFrame({"x": [1.5, 2.5, 3.5], "name": ["a", "b", "c"]}, index=[7, 8, 9])
    expected = [{"x": 1.5, "name": "a"}, {"x": 2.5, "name": "b"}, {"x": 3.5, "name": "c"}]

    class OfAnother:
        """A DataFrame of a library that shares nothing but the protocol."""

        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return pa.table(frame).__arrow_c_stream__(requested_schema)

    for given_ in (frame, OfAnother()):
        assert [plain(example) for example in stoker.from_table(given_)] == expected
    (batch,) = stoker.from_table(frame).batch(3)
    assert frozen(batch["x"]) == frozen(np.array([1.5, 2.5, 3.5]))
    for given_ in (frame, pa.table(frame)):
        with pytest.raises(TypeError, match="use from_table"):
            stoker.from_dataset(given_)


def test_nan_of_a_dataframe_stays_nan() -> None:
    """pandas gives it to Arrow as null, as it does with what is missing."""
    import pandas

    nan = float("nan")
    frame = pandas.DataFrame(
        {
            "x": [0.5, nan, 1.5],
            "small": np.array([nan, 1, 2], np.float32),
            "lists": [np.array([1.0, nan]), [nan, 2.0], [3.0, 4.0]],
            "texts": ["a", nan, "c"],
            "masked": pandas.array([1.0, None, 2.0], dtype="Float64"),
            "records": [{"v": nan}, {"v": 1.0}, None],
        },
        index=pandas.Index([nan, 1.0, 2.0], name="key"),
    )
    (batch,) = stoker.from_table(frame[["x", "small", "lists"]]).batch(3)
    assert frozen(batch["x"]) == frozen(np.array([0.5, nan, 1.5]))
    assert frozen(batch["small"]) == frozen(np.array([nan, 1, 2], np.float32))
    assert frozen(batch["lists"]) == frozen(np.array([[1, nan], [nan, 2], [3, 4.0]]))
    assert frozen(batch["key"]) == frozen(np.array([nan, 1, 2]))
    rows = list(stoker.from_table(frame))
    assert [row["texts"] for row in rows] == ["a", None, "c"]
    assert [row["masked"] for row in rows] == [1.0, None, 2.0]
    assert np.isnan(rows[0]["records"]["v"])
    assert rows[2]["records"] is None


def test_numbers_in_structs_and_maps_keep_their_types() -> None:
    fields = {"x": pa.float32(), "ids": pa.list_(pa.int16()), "inner": pa.struct({"n": pa.uint8()})}
    structs = pa.array([{"x": 0.5, "ids": [1, 2], "inner": {"n": n}} for n in range(4)])
    table = pa.table(
        {
            "s": structs.cast(pa.struct(fields)),
            "many": pa.array([[{"y": 1.5}]] * 4, pa.list_(pa.struct({"y": pa.float32()}))),
            "map": pa.array([[("k", 2.5)]] * 4, pa.map_(pa.string(), pa.float32())),
        }
    )
    for given_ in (table, pa.concat_tables([table.slice(0, 1), table.slice(1)]), table.slice(1)):
        (batch,) = stoker.from_table(given_).batch(4)
        found = batch["s"]["x"], batch["s"]["ids"], batch["s"]["inner"]["n"]
        assert [array.dtype for array in found] == [np.float32, np.int16, np.uint8]
        row = next(iter(stoker.from_table(given_)))
        assert type(row["many"][0]["y"]) is type(row["map"][0][1]) is np.float32
        assert [plain(row) for row in stoker.from_table(given_)] == given_.to_pylist()


def test_what_is_no_table() -> None:
    import pandas

    with pytest.raises(TypeError, match=r"pyarrow\.Table or a DataFrame"):
        stoker.from_table([1, 2])
    wrong: list[tuple[Any, str]] = [
        (numbers(0), "no rows"),
        (pa.table([[1], [2]], names=["a", "a"]), "two columns are called 'a'"),
        (pandas.DataFrame(index=range(3)), "has no columns"),
        (pandas.Series([1, 2]), "this Series is not a table for Arrow"),
        (pandas.DataFrame({"x": [1, "a"]}), "this DataFrame is not a table for Arrow"),
        (pandas.DataFrame({"x": ["a", 1]}), "this DataFrame is not a table for Arrow"),
    ]
    for data, says in wrong:
        with pytest.raises(ValueError, match=says):
            stoker.from_table(data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    pq.write_table(numbers(9), tmp_path / "a.parquet")
    pq.write_table(numbers(0), tmp_path / "empty.parquet")
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "mixed.parquet")
    pq.write_table(pa.table({"id": [1], "x": [2.0]}), tmp_path / "other.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"mixed\.parquet: column 'id' is string; in .*parquet it is int64.*=",
         (tmp_path / "{a,mixed}.parquet",)),
        (ValueError, r"column 'x' is double.*list<", (tmp_path / "{a,other}.parquet",)),
        (ValueError, r"mixed\.parquet: column 'id' is string; in .* int64\. Give it one type",
         (tmp_path / "{a,mixed}.parquet", ["id"])),
        (ValueError, r"has no column 'y', but id, x", (tmp_path / "a.parquet", ["y"])),
        (ValueError, r"cut\.parquet is not a Parquet file, or", (tmp_path / "cut.parquet",)),
        (ValueError, "has no rows, in 1 files", (tmp_path / "empty.parquet",)),
        (TypeError, "list of names", (tmp_path / "a.parquet", "id")),
        (FileNotFoundError, "nowhere", (tmp_path / "nowhere",)),
    ]  # fmt: skip
    for kind, says, given_ in wrong:
        with pytest.raises(kind, match=says):
            stoker.from_parquet(*given_)
    assert len(stoker.from_parquet(tmp_path / "{a,other}.parquet", ["id"])) == 10
    assert len(stoker.from_parquet(tmp_path / "{empty,a,empty}.parquet")) == 9
    with pytest.raises(ValueError, match="columns has 'id' twice"):
        stoker.from_parquet(tmp_path / "a.parquet", ["id", "id"])


UNIFIED: dict[str, tuple[tuple[Any, Any], tuple[Any, Any], Any]] = {
    "null": ((pa.null(), [None]), (pa.string(), ["b"]), pa.string()),
    "large text": ((pa.large_string(), ["a"]), (pa.string(), ["b"]), pa.large_string()),
    "view": ((pa.string_view(), ["a"]), (pa.string(), ["b"]), pa.large_string()),
    "dictionary": (
        (pa.dictionary(pa.int8(), pa.string()), ["a"]), (pa.string(), ["b"]), pa.string()
    ),
    "integers": ((pa.int32(), [1]), (pa.int64(), [2**40]), pa.int64()),
    "floats": ((pa.float32(), [0.5]), (pa.float64(), [1.5]), pa.float64()),
    "decimals": (
        (pa.decimal128(5, 2), [Decimal("1.25")]), (pa.decimal128(7, 3), [Decimal("9.125")]),
        pa.decimal128(7, 3),
    ),
    "lists": ((pa.list_(pa.int32()), [[1]]), (pa.list_(pa.int64()), [[2]]), pa.list_(pa.int64())),
    "structs": (
        (pa.struct({"x": pa.int8()}), [{"x": 1}]), (pa.struct({"x": pa.int64()}), [{"x": 2}]),
        pa.struct({"x": pa.int64()}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("protocol", ["", "file://"])
@pytest.mark.parametrize("kind", sorted(UNIFIED))
def test_types_that_differ_between_files_are_unified(
    tmp_path: Path, kind: str, protocol: str
) -> None:
    (one, first), (other, second), unified = UNIFIED[kind]
    for name, values in (("a", pa.array(first, one)), ("b", pa.array(second, other))):
        pq.write_table(pa.table({"x": values}), tmp_path / f"{name}.parquet")
    expected = pa.array([*first, *second], unified)
    for order, names in ((1, "a,b"), (-1, "b,a")):
        train = stoker.from_parquet(f"{protocol}{tmp_path}/{{{names}}}.parquet")
        rows = [row["x"] for row in train]
        assert [plain(row) for row in rows] == expected.to_pylist()[::order]
        alike = [row["x"] for row in stoker.from_table(pa.table({"x": expected}))][::order]
        assert frozen(rows) == frozen(alike)


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_a_column_that_a_file_lacks_is_null(tmp_path: Path, protocol: str) -> None:
    pq.write_table(pa.table({"id": [0, 1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"new": [2.5], "id": [2]}), tmp_path / "b.parquet")
    files = f"{protocol}{tmp_path}/*.parquet"
    rows = [(0, None), (1, None), (2, 2.5)]
    assert [tuple(row.values()) for row in stoker.from_parquet(files)] == rows
    only = stoker.from_parquet(files, ["new"])
    assert [row["new"] for row in only] == [None, None, 2.5]
    assert [row["new"] for row in next(iter(only.batch(3, collate=list)))] == [None, None, 2.5]
    with pytest.raises(stoker.StageError, match="'new' differs within a batch"):
        list(only.batch(3))
    some = stoker.from_parquet(files, ["id"], filters=[("new", ">", 1)])
    assert [row["id"] for row in some] == [2]
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'old', but id"):
        stoker.from_parquet(files, ["old"])


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_names_of_columns_may_have_dots(tmp_path: Path, protocol: str) -> None:
    structs = pa.array([{"b": n} for n in range(9)])
    table = pa.table({"a": structs, "z": range(9), "a.b": range(100, 109)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    path = f"{protocol}{tmp_path}/a.parquet"
    assert [plain(row) for row in stoker.from_parquet(path)] == table.to_pylist()
    only = stoker.from_parquet(path, ["a.b"])
    assert [int(row["a.b"]) for row in only] == [*range(100, 109)]
    (batch,) = only.batch(9)
    assert batch["a.b"].tolist() == [*range(100, 109)]
    for column, low in (("a.b", 104), ("z", 4)):
        some = stoker.from_parquet(path, ["z"], filters=[(column, ">=", low)])
        assert [int(row["z"]) for row in some] == [*range(4, 9)]


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_arrays_of_one_shape_in_files(tmp_path: Path, protocol: str) -> None:
    arrays = np.arange(54, dtype=np.float32).reshape(9, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(arrays)
    pq.write_table(pa.table({"t": tensors}), tmp_path / "a.parquet", row_group_size=4)
    train = stoker.from_parquet(f"{protocol}{tmp_path}/a.parquet")
    assert frozen([row["t"] for row in train]) == frozen([*arrays])
    (batch,) = train.batch(9)
    assert frozen(batch["t"]) == frozen(arrays)


def test_empty_row_groups_do_not_matter(tmp_path: Path) -> None:
    table = numbers(9)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 4), table.slice(0, 0), table.slice(4)):
            writer.write_table(part)
    assert [int(row["id"]) for row in stoker.from_parquet(tmp_path / "a.parquet")] == [*range(9)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_or_changed_file_is_named(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(numbers(40), path, row_group_size=10, compression="snappy")
    data = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(2).column(1).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    train = stoker.from_parquet(path).batch(5).workers(workers)
    with pytest.raises(stoker.StageError, match=r"row 20\).*a\.parquet, row group 2: "):
        list(train)
    lenient = stoker.from_parquet(path, max_errors=10).workers(workers)
    assert [int(row["id"]) for row in lenient] == [*range(20), *range(30, 40)]
    pq.write_table(numbers(41), path)
    train = stoker.from_parquet(path).workers(workers)
    pq.write_table(numbers(42), path)
    with pytest.raises(stoker.StageError, match=r"a\.parquet has changed"):
        list(train)


def test_runs_are_decoded() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array(["a", None]))
    numbers = pa.RunEndEncodedArray.from_arrays(pa.array([1, 5], pa.int16()), pa.array([7, 8]))
    table = pa.table({"runs": runs, "numbers": numbers}).slice(1)
    expected = [(None if n else "a", 8) for n in range(4)]
    assert [(row["runs"], row["numbers"]) for row in stoker.from_table(table)] == expected
    coded = pa.RunEndEncodedArray.from_arrays(
        pa.array([1], pa.int32()), pa.array(["a"]).dictionary_encode()
    )
    with pytest.raises(ValueError, match=r"column 'coded'.*run_end"):
        stoker.from_table(pa.table({"coded": coded}))
