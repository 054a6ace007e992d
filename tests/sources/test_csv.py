"""Rows of CSV files."""

from __future__ import annotations

import bz2
import csv
import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from strategies import few


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@settings(few(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False),
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6),
        ),
        min_size=1,
        max_size=8,
    ),
    delimiter=st.sampled_from([",", ";", "\t"]),
)
def test_rows_are_those_that_were_written(
    tmp_path: Path, rows: list[tuple[int, float, str]], delimiter: str
) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["a", "b", "c"])
        writer.writerows((a, b, f"x{c}") for a, b, c in rows)
    train = stoker.from_csv(path, delimiter=delimiter)
    assert [(row["a"], row["b"], row["c"][1:]) for row in train] == rows


def test_a_compressed_file_is_known_by_its_bytes(tmp_path: Path) -> None:
    text = b"x,y\n1,2\n"
    for name, data in (
        ("a.csv", gzip.compress(text)),
        ("b.csv.gz", text),
        ("c.csv.bz2", bz2.compress(text)),
    ):
        (tmp_path / name).write_bytes(data)
        assert list(stoker.from_csv(tmp_path / name)) == [{"x": 1, "y": 2}]
        with pytest.raises(ValueError, match="has no column 'z', only 'x', 'y'"):
            stoker.from_csv(tmp_path / name, ["z"])
    (tmp_path / "cut.csv").write_bytes(gzip.compress(text)[:-9])
    with pytest.raises(ValueError, match=r"cut\.csv cannot be read as CSV"):
        stoker.from_csv(tmp_path / "cut.csv")


def test_nan_is_no_missing_value(tmp_path: Path) -> None:
    lines = ["x,only,n,name,empty", "1.5,NaN,1,nan,", "nan,nan,NaN,b,", ",,3,c,", "-NaN,NaN,4,d,"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    rows = list(stoker.from_csv(tmp_path / "a.csv"))
    assert [str(row["x"]) for row in rows] == ["1.5", "nan", "None", "nan"]
    assert [str(row["only"]) for row in rows] == ["nan", "nan", "None", "nan"]
    assert [row["n"] for row in rows] == [1, None, 3, 4]
    assert [row["name"] for row in rows] == ["nan", "b", "c", "d"]
    assert [row["empty"] for row in rows] == [None] * 4
    (tmp_path / "a.csv").write_text("x\n1.5\n1.#QNAN\nNaN\n")
    assert [str(row["x"]) for row in stoker.from_csv(tmp_path / "a.csv")] == ["1.5", "None", "nan"]
    (tmp_path / "b.csv").write_text("x,name\n0.5,a\nNaN,b\n")
    (batch,) = stoker.from_csv(tmp_path / "b.csv").batch(2)
    assert str(batch["x"]) == "[0.5 nan]"


def test_columns_have_one_type_over_all_files(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "0.csv", "x,name", "1,a", ",b"),
        write(tmp_path / "1.csv", "name,x", "c,2.5"),
    ]
    assert list(stoker.from_csv(files)) == [
        {"x": 1.0, "name": "a"},
        {"x": None, "name": "b"},
        {"x": 2.5, "name": "c"},
    ]
    with gzip.open(tmp_path / "2.csv.gz", "wt") as file:
        file.write("x,name\n3,d\n")
    train = stoker.from_csv(str(tmp_path / "2.csv.gz"), ["x"])
    assert [dict(row) for row in train] == [{"x": 3}]


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    wrong: list[tuple[list[str], str]] = [
        (["a,b", "1,2,3"], "cannot be read as CSV.*Expected 2 columns"),
        (["a,a", "1,2"], "two columns are called 'a'"),
        (["a,a", "1.5,", "2.5,3"], "two columns are called 'a'"),
        (["a,b,,", "1,2,,"], "two columns are called ''"),
        (["a,b"], "no rows"),
        ([], "cannot be read as CSV"),
    ]
    for lines, message in wrong:
        with pytest.raises(ValueError, match=message):
            stoker.from_csv(write(tmp_path / "a.csv", *lines))
    first = write(tmp_path / "0.csv", "x,y", "1,2")
    with pytest.raises(ValueError, match="'z'"):
        stoker.from_csv(first, ["z"])
    with pytest.raises(ValueError, match="delimiter is one character"):
        stoker.from_csv(first, delimiter="||")
    with pytest.raises(ValueError, match=r"0.csv \['x', 'y'\]"):
        stoker.from_csv([first, write(tmp_path / "1.csv", "x", "1")])
    with pytest.raises(ValueError, match="numbers in one file and text in another"):
        stoker.from_csv([first, write(tmp_path / "1.csv", "x,y", "1,two")])
    (tmp_path / "1.csv").write_bytes("x\né\n".encode("latin1"))
    with pytest.raises(ValueError, match=r"column 'x' is not UTF-8.*iconv"):
        stoker.from_csv(tmp_path / "1.csv")


def test_too_large_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("wb") as file:
        file.truncate(1 << 43)  # sparse
    with pytest.raises(ValueError, match="too much for this host's memory"):
        stoker.from_csv(path)


def test_a_cache_needs_no_version_and_knows_changed_files(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for values in ("12", "345"):
        write(path, "x", *values)
        cached = stoker.from_csv(path).cache("1MiB", path=tmp_path / "cache")
        assert [row["x"] for row in cached] == [int(value) for value in values]
