"""Local files that were replaced or changed, with size and time of modification kept."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker


def tar(path: Path, letter: bytes) -> None:
    """Write a shard whose files have other places for another letter, within one size."""
    with tarfile.open(path, "w") as archive:
        for number in range(4):
            name = f"{number if letter == b'a' else 3 - number}.txt"
            member = tarfile.TarInfo(name)
            member.size = 600
            archive.addfile(member, io.BytesIO(letter * 599 + str(number).encode()))


def zipped(path: Path, letter: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(4):
            archive.writestr(f"{number}.txt", letter * 600)


def tokens(path: Path, letter: bytes) -> None:
    np.save(path, np.full(64, letter[0], np.int32))


def parquet(path: Path, letter: bytes) -> None:
    import pyarrow
    import pyarrow.parquet as pq

    pq.write_table(pyarrow.table({"x": np.full(64, letter[0])}), path)


KINDS: dict[str, tuple[str, Callable[[Path, bytes], None], Callable[[Path], Any]]] = {
    "tar": ("x.tar", tar, lambda path: stoker.from_tar(str(path), seed=0)),
    "zip": ("x.zip", zipped, lambda path: stoker.from_tar(str(path), seed=0)),
    "tokens": ("x.npy", tokens, lambda path: stoker.from_tokens(str(path), 8, seed=0)),
    "parquet": ("x.parquet", parquet, lambda path: stoker.from_parquet(str(path), seed=0)),
}


def replaced(path: Path, write: Callable[[Path, bytes], None], *, in_place: bool) -> None:
    """Put other content there as ``rsync -t`` and ``cp -p`` do: size and time are as before."""
    before = path.stat()
    new = path.with_suffix(".new" + path.suffix)
    write(new, b"b")
    assert new.stat().st_size == before.st_size
    os.utime(new, ns=(before.st_mtime_ns, before.st_mtime_ns))
    if in_place:
        path.write_bytes(new.read_bytes())
        shutil.copystat(new, path)
        new.unlink()
    else:
        os.replace(new, path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_built_anew_reads_the_new_content(
    kind: str, in_place: bool, tmp_path: Path
) -> None:
    name, write, build = KINDS[kind]
    path, other = tmp_path / name, tmp_path / f"other-{name}"
    write(path, b"a")
    first = [str(example) for example in build(path)]
    replaced(path, write, in_place=in_place)
    write(other, b"b")
    expected = [str(example) for example in build(other)]
    assert [str(example) for example in build(path)] == expected != first


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_built_before_says_so(kind: str, in_place: bool, tmp_path: Path) -> None:
    name, write, build = KINDS[kind]
    path = tmp_path / name
    write(path, b"a")
    train = build(path).workers(0)
    replaced(path, write, in_place=in_place)
    with pytest.raises(stoker.StageError, match="has changed"):
        list(train)


def test_what_is_open_while_it_is_replaced_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    tar(path, b"a")
    train = stoker.from_tar(str(path), seed=0).workers(0)
    with iter(train) as examples:
        next(examples)
        replaced(path, tar, in_place=False)
        assert all(b"a" in example["txt"] for example in examples)
