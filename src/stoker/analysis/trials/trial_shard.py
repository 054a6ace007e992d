"""A trial shard: a sample of the job's own files in one file, to be read as shards are.

It is a file without a name in the folder of the first of them, so on the same storage. It is gone
once it is closed, or its process has ended.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from stoker.analysis.trials.cold_reads import Reads, drop_files, read_all, read_files

RUN_BYTES = 1 << 20
"""A read of neighbours together, as large as those of ``stoker.from_tar`` from remote shards."""
# Written to the user's disk for a trial, and read three times: some seconds at 20 MB/s.
_MOST_BYTES = 64 << 20
# Enough for eight blocks of fifty: a seek of 10 ms each makes four seconds.
_MOST_FILES = 400
# In front of each file, whose size is rounded up to it, as in a tar archive.
_HEADER_BYTES = (
    512  # in front of each file, and what its size is rounded up to, as in a tar archive
)


@dataclass(frozen=True)
class PackingTrial:
    """Rates of reading the same files in three ways, with nothing in the page cache."""

    files: int
    nbytes: int
    one_by_one: Reads
    by_offset: Reads
    """From the shard, in random order."""
    in_runs: Reads
    """From the shard, RUN_BYTES of neighbours at a time, in random order."""


def choose_sample(paths: Sequence[str], most: int = _MOST_FILES) -> list[str]:
    """Return at most so many of the files, spread evenly over the list. Raises OSError."""
    few = list(paths[:: -(-len(paths) // max(1, min(most, _MOST_FILES)))])
    sizes = {path: os.path.getsize(path) for path in few}
    whole = sum(sizes.values())
    if whole > _MOST_BYTES:
        few = few[:: -(-whole // _MOST_BYTES)]
    random.Random(0).shuffle(few)  # as training reads them
    return few


def try_packing(
    paths: Sequence[str], shard: TrialShard, readers: int, longest_s: float
) -> PackingTrial:
    """Read files one by one, and from their shard, for at most ``longest_s`` each.

    Raises OSError.
    """
    drop_files(paths)
    one_by_one = read_files(paths, readers, longest_s)
    runs = shard.runs()
    in_runs = shard.read(runs, readers, longest_s)
    by_offset = shard.read(shard.extents, readers, longest_s)
    each = len(paths) / len(runs)
    counted = [(count * each, seconds) for count, seconds in in_runs]
    return PackingTrial(len(paths), shard.nbytes, one_by_one, by_offset, counted)


class TrialShard:
    """A trial shard of some files. Raises OSError if it cannot be written.

    Attributes:
        extents: start and bytes of each file in it, its header included.
        nbytes: its size.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        folder = os.path.dirname(os.path.abspath(paths[0]))
        self._descriptor = os.open(folder, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o600)
        self.extents: list[tuple[int, int]] = []
        self.nbytes = 0
        try:
            for path in paths:
                self._append(path)
            os.fsync(self._descriptor)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TrialShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete it."""
        os.close(self._descriptor)

    def runs(self) -> list[tuple[int, int]]:
        """Return the extents of runs of neighbours."""
        return [
            (start, min(RUN_BYTES, self.nbytes - start))
            for start in range(0, self.nbytes, RUN_BYTES)
        ]

    def read(self, extents: Sequence[tuple[int, int]], readers: int, longest_s: float) -> Reads:
        """Read parts in random order with nothing in the page cache. Raises OSError."""
        drop_files([f"/proc/self/fd/{self._descriptor}"])
        shuffled = random.Random(0).sample(extents, len(extents))
        return read_all(shuffled, self._read_part, readers, longest_s)

    def _read_part(self, extent: tuple[int, int]) -> None:
        start, nbytes = extent
        while nbytes > 0:
            found = len(os.pread(self._descriptor, nbytes, start))
            if not found:
                raise OSError("the trial shard was cut short")
            start, nbytes = start + found, nbytes - found

    def _append(self, path: str) -> None:
        with open(path, "rb") as file:
            data = bytes(_HEADER_BYTES) + file.read()
        data += bytes(-len(data) % _HEADER_BYTES)
        self.extents.append((self.nbytes, len(data)))
        self.nbytes += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]
