"""``stoker-native``: files read, and rows copied, many in one call."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("stoker_native", reason="stoker-native is not installed")

MOST_BYTES = 4 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


sizes = st.sampled_from([0, 1, 100, 65_536, (1 << 20) - 1, 3 << 20, MOST_BYTES - 1, MOST_BYTES])


@given(st.lists(sizes, max_size=5))
def test_files_are_read_up_to_the_first_that_has_no_room(folder: Path, sizes: list[int]) -> None:
    contents = [np.random.default_rng(size).bytes(size) for size in sizes]
    paths = [folder / f"{number}.bin" for number in range(len(sizes))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    fit = [sum(sizes[: number + 1]) < MOST_BYTES for number in range(len(sizes))]
    assert native.read_files(list(map(str, paths))) == contents[: sum(fit)]


def test_what_cannot_be_read_ends_the_list(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "folder", "pipe"):
        paths = [str(tmp_path / each) for each in ("a", name, "a")]
        assert native.read_files(paths) == [b"a"]


@given(
    st.sampled_from(["u1", ">u2", "f4", "c16", "M8[s]", "S3"]),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(0, 6),
)
def test_rows_are_copied(dtype: str, shape: list[int], count: int) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    rng = np.random.default_rng(count)
    rows = [np.frombuffer(rng.bytes(size), dtype).reshape(shape) for _ in range(count)]
    out = np.zeros((count, *shape), dtype)
    native.copy_rows(rows, out)
    assert out.tobytes() == b"".join(each.tobytes() for each in rows)


def test_the_rows_of_an_array_are_copied() -> None:
    array, out = np.arange(2_400).reshape(400, 6), np.zeros((400, 6), np.int64)
    native.copy_rows(array, out)  # an array makes each of its rows when it is asked for it
    assert out.tolist() == array.tolist()


ROW = np.zeros((4, 6), np.uint8)
WIDE = np.zeros((4, 12), np.uint8)


@pytest.mark.parametrize(
    "row",
    [
        ROW[:3],
        ROW.astype(np.int8),
        np.zeros((6, 4), np.uint8).T,
        np.zeros((4, 12), np.uint8)[:, ::2],
        SimpleNamespace(shape=ROW.shape, dtype=ROW.dtype, flags=ROW.flags),
    ],
    ids=["shape", "dtype", "transposed", "strided", "no array"],
)
def test_other_rows_are_refused(row: Any) -> None:
    with pytest.raises(ValueError, match="rows are C-ordered"):
        native.copy_rows([ROW, row], np.zeros((2, 4, 6), np.uint8))


def test_other_batches_are_refused() -> None:
    read_only = np.zeros((1, 4, 6), np.uint8)
    read_only.flags.writeable = False
    for out in (np.zeros((2, 4, 6), np.uint8), read_only, np.zeros((1, 4, 6), object)):
        with pytest.raises(ValueError, match="one array for each row"):
            native.copy_rows([ROW], out)
    with pytest.raises(ValueError, match="of rows is C-ordered"):
        native.copy_rows([ROW], np.zeros((1, 4, 12), np.uint8)[:, :, ::2])


@given(
    st.sampled_from(["u1", ">u2", "f4", "c16", "M8[s]", "S3"]),
    st.lists(st.integers(0, 9), max_size=2),
    st.lists(st.integers(0, 6), max_size=9),
    st.sampled_from([1, 2, -1]),
)
def test_rows_are_gathered(dtype: str, shape: list[int], numbers: list[int], step: int) -> None:
    size = 14 * int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = np.frombuffer(np.random.default_rng(0).bytes(size), dtype).reshape(14, *shape)[::step]
    wanted, out = np.array(numbers, np.int64), np.zeros((len(numbers), *shape), dtype)
    native.gather_rows(array, wanted, out)
    assert out.tobytes() == array[wanted].tobytes()


@pytest.mark.parametrize(
    ("array", "numbers", "out"),
    [
        (ROW, np.zeros(2, np.int32), np.zeros((2, 6), np.uint8)),
        (ROW, np.zeros(4, np.int64)[::2], np.zeros((2, 6), np.uint8)),
        (ROW, np.zeros(2, np.int64), np.zeros((3, 6), np.uint8)),
        (ROW, np.zeros(2, np.int64), np.zeros((2, 6), np.int8)),
        (ROW, np.zeros(2, np.int64), WIDE[:2, ::2]),
        (WIDE[:, ::2], np.zeros(2, np.int64), np.zeros((2, 6), np.uint8)),
        *((ROW, np.array([0, n]), np.zeros((2, 6), np.uint8)) for n in (-1, 4, 1 << 62)),
    ],
    ids=["int32", "numbers", "count", "dtype", "out", "rows", "below 0", "beyond", "far beyond"],
)
def test_other_rows_and_those_that_are_not_there_are_not_gathered(
    array: Any, numbers: Any, out: Any
) -> None:
    is_there = numbers[-1] == 0
    says = r"C-ordered|does not fit" if is_there else "0 to 3"
    with pytest.raises(ValueError if is_there else IndexError, match=says):
        native.gather_rows(array, numbers, out)
