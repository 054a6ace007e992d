"""Shards as a source: examples by number, read by the offsets of their files.

At URLs one request reads an example, or a run of neighbours: runs are read if an epoch's order
keeps neighbours together, and kept as long as they are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint
from stoker.basics.resources import format_bytes
from stoker.basics.validate import names_in
from stoker.basics.warn import warn
from stoker.schedule.numbering import Numbering
from stoker.schedule.orders.blocks import WINDOW
from stoker.schedule.selection import Selection
from stoker.sources.files import READ_AT_LEAST, OpenFiles, refuse_too_large
from stoker.sources.in_files import FileItem, RangedFiles, fingerprint_in
from stoker.sources.patterns import Paths
from stoker.sources.remote.reader import BlockReader, Files, HeldBlocks, RemoteFile
from stoker.sources.remote.storage import RemoteOptions
from stoker.sources.shards.archives import HEADER_BYTES, UnusableShardError, is_header, unzip
from stoker.sources.shards.index import ShardIndex, index_of, show_progress
from stoker.sources.source import Indices, Reader

KEY = "__key__"
# A disk reads that much in a fraction of a seek's time; of larger examples nothing between their
# files is read.
_SMALL = 1 << 18
# Headers and padding, in front of each file: a tar header of 512 bytes, a long name's, and the rest
# of a block.
_BETWEEN = 2048
# The most bytes of a read, as a multiple of the example's files: beyond that three quarters of each
# read are dropped.
_SCATTERED = 4
# Examples in a run, on average: with fewer, blocks save less than half of the requests and cost
# randomness.
_FEWEST = 2
RUN_BYTES = 1 << 20
"""Examples that begin in the same so many bytes of a shard are a run. bench/results/records.json,
row "server: tar": 0.19 requests an example, 1.24 times as fast as files."""
KEPT_BYTES = 4 * WINDOW * RUN_BYTES
"""Of runs that are kept: those that a shuffle draws from, and those it drew from before. 64 MiB;
a reader behind another still finds them."""
AHEAD_BYTES = 2 * WINDOW * RUN_BYTES
"""Of runs that are read ahead of their use: two windows, the one that is used and the next. 32
MiB."""
Read = Callable[[int, int], bytes]
"""``read(start, nbytes)``: reads bytes of a shard."""


class ShardSource(RangedFiles):
    """Files in tar or zip archives, grouped by key; an example is a dict of their bytes.

    At URLs runs of neighbours are read if an epoch's order keeps these together, else single
    examples. Unless ``is_strict``, only the incomplete examples of a damaged shard fail.
    """

    caller = "from_tar"
    prefers_blocks = False
    _files: Sequence[ShardIndex]

    def __init__(
        self, paths: Paths, options: RemoteOptions, fields: Sequence[str] | None, *, is_strict: bool
    ) -> None:
        self._fields = None if fields is None else names_in("fields", fields, "['jpg', 'cls']")
        self._files = self.look(paths, options, index_of, show=show_progress)
        self._numbering = Numbering([len(shard.keys) for shard in self._files])
        for shard in self._files:
            _tell_damage(shard, is_strict=is_strict)
        if not self._numbering.total:
            raise ValueError(f"{self.name} has no examples: no files with a name and a suffix")
        there = dict.fromkeys(field for shard in self._files for field in shard.fields)
        for field in self._fields or ():
            if field not in there:
                shown_fields = ", ".join(map(repr, there))
                raise ValueError(f"{self.name} has no field {field!r}; it has {shown_fields}")
        self._opened = OpenFiles()
        if self.access is not None:
            for shard in self._files:
                _refuse_scattered(shard)
            self._runs = find_runs(self._files)
            self.prefers_blocks = _FEWEST * len(self._runs.starts) <= len(self)

    @property
    def fields(self) -> Sequence[str | int] | None:
        return None if self._fields is None else (KEY, *self._fields)

    def __len__(self) -> int:
        return self._numbering.total

    @property
    def blocks(self) -> NDArray[np.int64]:
        """The shards that have examples; at URLs runs of neighbours of about a MiB."""
        if self.access is not None:
            return self._runs.examples.ends
        return np.setdiff1d(self._numbering.ends, [0])

    def fetch(self, indices: Indices) -> list[Any]:
        if self.access is not None:
            return super().fetch(indices)
        examples = []
        for index in indices:
            shard, number = self._locate(int(index))
            files = shard.files_of(number)
            wanted = [files[field] for field in self._fields or files if field in files]
            read = functools.partial(self._opened.read, shard.path, shard.version)
            examples.append(self._make(shard, number, files, _at_once(wanted, read)))
        return examples

    def extent(self) -> str:
        text = f"{len(self):,} examples in {len(self._files):,} shards"
        kept = f"; of runs up to {format_bytes(KEPT_BYTES)} are kept in memory"
        return text if self.access is None else text + kept

    def reader(self, selection: Selection | None = None) -> Reader | None:
        if self.access is None:
            return None
        ends = self._runs.examples.ends
        together = selection is not None and selection.goes_through(ends)
        if not together and (selection is None or len(ends) > WINDOW):
            return self.access.reader(self)
        runs = ShardRuns(self._runs, self._files, self)
        return BlockReader(runs, self.access.reader(runs), AHEAD_BYTES)

    def locate(self, index: int) -> RemoteFile:
        """Return the range from the header of the example's first file to the end of its last."""
        shard, number = self._locate(index)
        places = shard.files_of(number).values()
        start, end = _begin(min(places)), max(at + nbytes for at, nbytes, _ in places)
        if end > shard.version.size_bytes:
            raise ValueError(f"example {shard.keys[number]!r}: {shard.path} {shard.damage}")
        return RemoteFile(shard.path, end - start, start, *shard.version[:2])

    def example(self, index: int, data: bytes) -> dict[str, Any]:
        shard, number = self._locate(index)
        files = shard.files_of(number)
        place = min(files.values())
        first = _begin(place)
        if first < place[0] and not is_header(data[:HEADER_BYTES], place[1]):
            raise ValueError(
                f"example {shard.keys[number]!r}: {shard.path} has changed since the pipeline was "
                "built: build it again"
            )

        def read(start: int, nbytes: int) -> bytes:
            return data[start - first : start - first + nbytes]

        return self._make(shard, number, files, read)

    def settings(self) -> str:
        return f"shards {'all' if self._fields is None else list(self._fields)}"

    def item(self, index: int) -> FileItem:
        shard, number = self._locate(index)
        return FileItem(shard, number, f"/{shard.keys[number]}")

    def fingerprint(self, index: int) -> Fingerprint:
        return fingerprint_in(*self.item(index))

    def _locate(self, index: int) -> tuple[ShardIndex, int]:
        shard, number = self._numbering.find(index)
        return self._files[shard], number

    def _make(
        self, shard: ShardIndex, number: int, files: dict[str, list[int]], read: Read
    ) -> dict[str, Any]:
        """Make an example from its files, which ``read(start, nbytes)`` returns."""
        example: dict[str, Any] = {KEY: shard.keys[number]}
        for field in self._fields or files:
            found = files.get(field)
            if found is None:
                raise ValueError(
                    f"{shard.path}: example {example[KEY]!r} has no {field!r}, only "
                    f"{', '.join(map(repr, files))}"
                )
            start, nbytes, inflated_bytes = found
            refuse_too_large(max(nbytes, inflated_bytes), shard.path)
            try:
                data = read(start, nbytes)
                if inflated_bytes >= 0:
                    data = unzip(data, inflated_bytes, f"{example[KEY]}.{field}")
                example[field] = data
            except ValueError as error:
                raise ValueError(f"{field!r} of example {example[KEY]!r}: {error}") from error
        return example


def _begin(place: Sequence[int]) -> int:
    """Return where a file begins, from its header on: in a zip archive it has that already."""
    start, _, inflated_bytes = place
    return start - (HEADER_BYTES if inflated_bytes < 0 else 0)


def _at_once(places: Sequence[Sequence[int]], read: Read) -> Read:
    """Return what reads an example's small files in one read, if they are adjacent: one seek."""
    if len(places) < 2:
        return read
    first = min(start for start, *_ in places)
    span = max(start + nbytes for start, nbytes, _ in places) - first
    if span > min(_SMALL, sum(nbytes for _, nbytes, _ in places) + _BETWEEN * len(places)):
        return read
    held = b""

    def read_part(start: int, nbytes: int) -> bytes:
        nonlocal held
        if not held:
            try:
                held = read(first, span)
            except ValueError:  # perhaps not all of them are damaged
                return read(start, nbytes)
        return held[start - first : start - first + nbytes]

    return read_part


def _tell_damage(shard: ShardIndex, *, is_strict: bool) -> None:
    """Refuse a damaged shard, or warn of it."""
    if not shard.damage:
        return
    at = shard.places
    beyond = np.flatnonzero(at.starts + at.nbytes > shard.version.size_bytes)
    text = f"{shard.path} {shard.damage}"
    if len(beyond):
        key = shard.keys[int(np.searchsorted(at.ends, beyond[0], side="right"))]
        text += f" (example {key!r} is not all there)"
    if is_strict:
        raise ValueError(
            f"{text}. Write it again; or give max_errors=, which leaves out such examples and what "
            "comes behind them"
        )
    warn(f"{text}: what comes behind is left out")


def _refuse_scattered(shard: ShardIndex) -> None:
    """Refuse a shard whose examples' files lie far apart: a request would read all between."""
    starts, stops = spans_of(shard)
    if not len(starts):
        return
    spans = stops - starts
    first = np.concatenate([[0], shard.places.ends[:-1]])
    wanted = np.add.reduceat(shard.places.nbytes, first)
    worst = int(np.argmax(spans - wanted))
    if spans[worst] > _SCATTERED * wanted[worst] + READ_AT_LEAST:
        raise UnusableShardError(
            f"{shard.path}: the files of example {shard.keys[worst]!r} lie {int(spans[worst]):,} "
            f"bytes apart, so one request would read all of these for {int(wanted[worst]):,}: "
            "pack the shard again, with the files of an example next to each other"
        )


class Runs(NamedTuple):
    """The runs of all shards, one after another."""

    examples: Numbering
    """The numbering of examples in each run, and of runs in all shards."""
    shards: NDArray[np.int64]
    starts: NDArray[np.int64]
    """The range in bytes of its shard."""
    stops: NDArray[np.int64]


class _Run(NamedTuple):
    start: int
    num_rows: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class ShardRuns:
    """The runs of one epoch; ``BlockFiles``, and the ``Files`` that are read for these."""

    def __init__(self, runs: Runs, shards: Sequence[ShardIndex], examples: Files) -> None:
        self.held = HeldBlocks(KEPT_BYTES)
        self._runs = runs
        self._shards = shards
        self._examples = examples

    def blocks_of(self, indices: Indices) -> NDArray[Any]:
        return self._runs.examples.parts(np.asarray(indices, np.int64))

    def locate(self, index: int) -> RemoteFile:
        _, shards, starts, stops = self._runs
        start, stop = int(starts[index]), int(stops[index])
        shard = self._shards[int(shards[index])]
        return RemoteFile(shard.path, stop - start, start, *shard.version[:2])

    def example(self, index: int, data: bytes) -> _Run:
        examples = self._runs.examples
        rows = int(examples.ends[index] - examples.starts[index])
        return _Run(int(self._runs.starts[index]), rows, data)

    def examples_of(self, indices: Indices, read: Callable[[int], Any]) -> list[Any]:
        examples = []
        for index, block in zip(indices, self.blocks_of(indices).tolist(), strict=True):
            place = self._examples.locate(int(index))
            assert place.start is not None
            run = self.held.get(block, functools.partial(read, block))
            start = place.start - run.start
            data = run.data[start : start + place.size]
            examples.append(self._examples.example(int(index), data))
        return examples


def find_runs(shards: Sequence[ShardIndex]) -> Runs:
    """Cut shards into runs of consecutive examples; no run spans two shards."""
    parts = []
    for number, shard in enumerate(shards):
        starts, stops = spans_of(shard)
        if not len(starts):
            continue
        first = np.flatnonzero(np.diff(starts // RUN_BYTES, prepend=-1))
        counts, shard_numbers = np.diff(first, append=len(starts)), np.full(len(first), number)
        # A truncated shard is read up to its end; each example beyond it fails.
        ends = np.minimum(np.maximum.reduceat(stops, first), shard.version.size_bytes)
        parts.append((counts, shard_numbers, np.minimum.reduceat(starts, first), ends))
    rows, *places = (np.concatenate(each).astype(np.int64) for each in zip(*parts, strict=True))
    return Runs(Numbering(rows), *places)


def spans_of(shard: ShardIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each example's range, from the header of its first file to its end."""
    ends, _, starts, nbytes, inflated_bytes = shard.places
    if not len(ends):
        return ends, ends
    starts = starts - np.where(inflated_bytes < 0, HEADER_BYTES, 0)
    first = np.concatenate([[0], ends[:-1]])
    stops = np.maximum.reduceat(shard.places.starts + nbytes, first)
    return np.minimum.reduceat(starts, first), stops
