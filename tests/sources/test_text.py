"""Lines of text files and of JSON Lines by number."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.sources import text
from strategies import few

same_folder = settings(few(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\ufeff"), max_size=8
)


def write(folder: Path, *files: bytes) -> list[str]:
    paths = [folder / f"{number}.txt" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    return list(map(str, paths))


@same_folder
@given(
    files=st.lists(st.lists(texts, max_size=9), min_size=1, max_size=3),
    end=st.sampled_from(["\n", "\r\n"]),
    is_ended=st.booleans(),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    chunk=st.integers(1, 20),
    draw=st.randoms(use_true_random=False),
)
def test_lines_are_those_that_were_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[list[str]],
    end: str,
    is_ended: bool,
    mark: bytes,
    chunk: int,
    draw: Any,
) -> None:
    monkeypatch.setattr(text, "_CHUNK_BYTES", chunk)
    if not is_ended:  # an empty last line without an end is no line
        files = [lines[:-1] if lines and not lines[-1] else lines for lines in files]
        ends = ["" if lines and lines[-1] else end for lines in files]
    else:
        ends = [end] * len(files)
    contents = [
        mark + (end.join(lines) + last if lines else "").encode()
        for lines, last in zip(files, ends, strict=True)
    ]
    lines = [line for each in files for line in each]
    paths = write(tmp_path, *contents)
    if not lines:
        with pytest.raises(ValueError, match="no lines"):
            stoker.from_text(paths)
        return
    train = stoker.from_text(paths, seed=0)
    assert len(train) == len(lines)
    assert list(train) == lines
    assert sorted(train.shuffle()) == sorted(lines)
    values = [json.dumps([line], ensure_ascii=draw.random() < 0.5) for line in lines]
    blanks = [draw.choice(["", "", "\n", "\r\n\n", " \n", "\t \r\n"]) for _ in values]
    (path,) = write(
        tmp_path, mark + "".join(b + v + end for b, v in zip(blanks, values, strict=True)).encode()
    )
    assert list(stoker.from_jsonl(path)) == [[line] for line in lines]


def test_jsonl_reads_what_python_writes(tmp_path: Path) -> None:
    values = [{"a": [1, 2.5, None, True]}, float("inf"), 2**70, "\ud800", "\u2028", {}, "", [[]]]
    (path,) = write(tmp_path, "\n".join(map(json.dumps, values)).encode())
    assert list(stoker.from_jsonl(path)) == values
    (path,) = write(tmp_path, b"NaN\n1e400\n")
    assert [str(value) for value in stoker.from_jsonl(path)] == ["nan", "inf"]


def test_lines_of_blanks_are_left_out_of_jsonl(tmp_path: Path) -> None:
    lines = ["", " ", "1", "\t \r", " 2", "   ", "\r", '" "', "   "]
    (path,) = write(tmp_path, "\n".join(lines).encode())
    train = stoker.from_jsonl(path)
    assert list(train) == [1, 2, " "]
    assert [train.name_of(number) for number in range(3)] == ["0.txt:3", "0.txt:5", "0.txt:8"]
    assert len(stoker.from_text(path)) == 9


def test_a_bad_line_is_named_and_may_be_skipped(tmp_path: Path) -> None:
    (path,) = write(tmp_path, b'\n{"a": 1}\n\n{"a": \n{"a": "\xe9"}\n{"a": 4}\n')
    train = stoker.from_jsonl(path)
    assert len(train) == 4
    with pytest.raises(stoker.StageError, match="this is not JSON: Expecting value") as caught:
        list(train)
    assert f"{path}:4" in str(caught.value)
    with pytest.raises(stoker.StageError, match=r"txt:5\): .* byte 7 of the line, 0xe9, is not"):
        list(train.skip(2))
    assert [row["a"] for row in stoker.from_jsonl(path, max_errors=2)] == [1, 4]
    (text,) = write(tmp_path, b"good\n\xff\n")
    with pytest.raises(stoker.StageError, match=r"txt:2\): .* byte 0 of the line, 0xff.*iconv"):
        list(stoker.from_text(text))


@pytest.mark.parametrize("content", [b"[\n1,\n2\n]", b'{\n"a": 1\n}', b'[{"a": 1},\n{"a": 2}]'])
def test_one_value_over_many_lines_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    (path,) = write(tmp_path, content)
    with pytest.raises(stoker.StageError, match=r"from_dataset\(json.load\(file\)\)"):
        list(stoker.from_jsonl(path))


def test_files_that_have_no_lines_to_be_found_are_refused(tmp_path: Path) -> None:
    (path,) = write(tmp_path, gzip.compress(b"a\nb\n"))
    with pytest.raises(ValueError, match=r"compressed \(gzip\).*Decompress it.*from_iterable"):
        stoker.from_text(path)
    (path,) = write(tmp_path, "a\nb\n".encode("utf-16"))
    with pytest.raises(ValueError, match=r"UTF-16.*iconv"):
        stoker.from_jsonl(path)
    (path,) = write(tmp_path, b"\n\r\n\n")
    with pytest.raises(ValueError, match="no lines"):
        stoker.from_jsonl(path)
    with pytest.raises(FileNotFoundError):
        stoker.from_text(str(tmp_path / "*.jsonl"))
    with pytest.raises(ValueError, match="copy them to a local disk"):
        stoker.from_text("https://example.com/a.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        stoker.from_text(str(tmp_path / "pipe"))


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    (path,) = write(tmp_path, b"a\nb\n")
    train = stoker.from_text(path)
    assert list(train) == ["a", "b"]
    with open(path, "ab") as file:
        file.write(b"c\n")
    with pytest.raises(stoker.StageError, match="has changed since the pipeline was built"):
        list(train)
    assert list(stoker.from_text(path)) == ["a", "b", "c"]


def test_a_cache_needs_no_version_and_knows_changed_files(tmp_path: Path) -> None:
    (path,) = write(tmp_path, b"1\n2\n3\n")

    def build() -> stoker.Pipeline:
        return stoker.from_jsonl(path).cache("1MiB", path=tmp_path / "cache")

    first = build()
    assert list(first) == list(first) == [1, 2, 3]
    assert (found := first.stats().cache) is not None
    assert found.hits == 3
    Path(path).write_bytes(b"4\n5\n6\n")
    assert list(build()) == [4, 5, 6]
