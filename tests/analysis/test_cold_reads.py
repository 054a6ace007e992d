"""Reading files again, by several threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.analysis import cold_reads


def test_all_files_are_read_in_blocks(tmp_path: Path) -> None:
    paths = []
    for number in range(20):
        paths.append(str(tmp_path / f"{number}"))
        Path(paths[-1]).write_bytes(b"x" * 5000)
    for readers in (0, 1, 3):
        reads = cold_reads.read_files(paths, readers, 60.0)
        assert sum(count for count, _ in reads) == 20
        assert all(seconds > 0 for _, seconds in reads)
    assert len(cold_reads.read_files(paths, 2, 0.0)) == 1  # the time is up behind a block


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x")
    paths = [str(tmp_path / name) for name in ("there", "gone", "there", "there")]
    with pytest.raises(FileNotFoundError, match="gone"):
        cold_reads.read_files(paths, 2, 60.0)
