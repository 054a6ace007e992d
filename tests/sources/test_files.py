"""Local files: regular ones alone are examples, and nothing else is waited for."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stoker
from backends import backend  # noqa: F401

WITHIN_S = 200.0


def within_time(act: Callable[[], Any]) -> Any:
    """Return what a call gives, in a thread: reading a pipe would never come back."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WITHIN_S)
    assert not thread.is_alive(), "it hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        at = os.getcwd()
        os.chdir(path.parent)  # a socket's address is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(at)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


SPECIAL = [make_pipe, make_socket, make_link_to_device, make_link_to_pipe]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c").mkdir()
    for n in range(4):
        (tmp_path / "c" / f"{n}.png").write_bytes(b"%d" % n)
    return tmp_path


def read(pipeline: stoker.Pipeline, field: int = 0) -> list[Any]:
    return [example[field] for example in pipeline]


@pytest.mark.parametrize("make", SPECIAL)
def test_what_is_no_regular_file_is_left_out_and_refused_where_it_is_named(
    folder: Path, make: Any
) -> None:
    odd = folder / "c" / "1a.png"
    make(odd)
    for field, build, place in (
        (0, stoker.from_folder, folder),
        (1, stoker.from_files, f"{folder}/c/*.png"),
    ):
        with pytest.warns(UserWarning, match=rf"{build.__name__}.*1a\.png") as caught:
            pipeline = build(place)
        assert caught[0].filename == __file__
        assert within_time(partial(read, pipeline, field)) == [b"0", b"1", b"2", b"3"]
    with pytest.raises(ValueError, match=r"1a\.png is not a regular file"):
        stoker.from_files(odd)


def test_how_many_are_left_out_is_said(folder: Path) -> None:
    for n in range(3):
        make_pipe(folder / "c" / f"x{n}.png")
    with pytest.warns(UserWarning, match=r"c/x0\.png' and 2 more"):
        stoker.from_folder(folder)


def test_a_folder_that_cannot_be_listed_is_said(folder: Path) -> None:
    (folder / "c" / "locked").mkdir(mode=0)
    before = os.geteuid()
    if before == 0:  # root lists everything
        for path in (folder, *folder.parents):
            if path.owner() == "root" and path.stat().st_uid == 0 and "pytest" in str(path):
                path.chmod(0o755)
        os.seteuid(65534)
    try:
        with pytest.warns(UserWarning, match="cannot be listed.*c/locked"):
            stoker.from_folder(folder)
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("make", SPECIAL)
@pytest.mark.parametrize("named", ["folder", "list", "url"])
def test_a_file_that_was_replaced_fails_and_may_be_skipped(
    folder: Path, make: Any, named: str
) -> None:
    files = [str(folder / "c" / f"{n}.png") for n in range(4)]

    def build(**how: Any) -> stoker.Pipeline:
        if named == "folder":
            return stoker.from_folder(folder, **how)
        if named == "list":
            return stoker.from_files(files, **how)
        return stoker.from_files([f"file://{file}" for file in files], timeout_s=1000.0, **how)

    strict, lenient = build(), build(max_errors=1)
    (folder / "c" / "2.png").unlink()
    make(folder / "c" / "2.png")
    with pytest.raises(stoker.StageError, match=r"example 2 .*2\.png"):
        within_time(lambda: read(strict))
    field = 0 if named == "folder" else 1
    assert within_time(lambda: read(lenient, field)) == [b"0", b"1", b"3"]
    assert lenient.stats().skipped_examples == 1


def test_links_to_files_are_examples_and_folders_named_like_images_are_folders(
    folder: Path,
) -> None:
    (folder / "c" / "0a.png").symlink_to("3.png")
    (folder / "c" / "4.png").mkdir()
    (folder / "c" / "4.png" / "5.png").write_bytes(b"5")
    assert read(stoker.from_folder(folder)) == [b"0", b"3", b"1", b"2", b"3", b"5"]


@pytest.mark.parametrize("target", ["nowhere", "2.png", "a sparse file beyond memory"])
def test_what_cannot_be_read_fails_and_may_be_skipped(folder: Path, target: str) -> None:
    file, says = folder / "c" / "2.png", r"2\.png"
    if target.startswith("a sparse"):
        os.truncate(file, 1 << 42)  # and takes no memory
        says = "do not fit into memory"
    else:
        file.unlink()
        file.symlink_to(target)
    with pytest.raises(stoker.StageError, match=says):
        read(stoker.from_folder(folder))
    assert read(stoker.from_folder(folder, max_errors=1)) == [b"0", b"1", b"3"]


def test_a_file_became_a_folder(folder: Path) -> None:
    pipeline = stoker.from_folder(folder)
    (folder / "c" / "2.png").unlink()
    (folder / "c" / "2.png").mkdir()
    with pytest.raises(stoker.StageError, match="a folder") as caught:
        read(pipeline)
    assert isinstance(caught.value.__cause__, IsADirectoryError)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_all_bytes_of_a_file_are_read(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    path = tmp_path / os.fsdecode(b"\xff \xc3\xa4.bin")
    path.write_bytes(content)
    (file,) = stoker.from_files(path, seed=0)
    assert file == (str(path), content)


def test_the_name_of_a_file_that_is_there_is_no_pattern(tmp_path: Path) -> None:
    for name in ("x[1].bin", "x1.bin"):
        (tmp_path / name).write_text(name)
    (found,) = stoker.from_files(tmp_path / "x[1].bin")
    assert found.data == b"x[1].bin"
    assert len(stoker.from_files(tmp_path / "x[12].bin")) == 1


def test_sparse_and_shortened_files_are_what_is_in_them(folder: Path) -> None:
    pipeline = stoker.from_folder(folder)
    os.truncate(folder / "c" / "1.png", 100_000)
    os.truncate(folder / "c" / "2.png", 0)
    assert read(pipeline) == [b"0", b"1" + bytes(99_999), b"", b"3"]


@pytest.mark.parametrize("make", SPECIAL)
@pytest.mark.parametrize("name", ["a.tar", "a.parquet", "a.npy"])
def test_what_is_no_file_is_refused_where_files_are_opened(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    make(path)
    read: dict[str, Callable[[Path], Any]] = {
        "a.tar": stoker.from_tar,
        "a.parquet": stoker.from_parquet,
        "a.npy": lambda each: stoker.from_tokens(each, 4),
    }
    for given in (path, tmp_path / f"*{path.suffix}"):
        with pytest.raises(ValueError, match=f"{name} is not a regular file: from_"):
            within_time(lambda each=given: read[name](each))  # type: ignore[misc]
