"""Runs of neighbours in shards behind URLs: each is read by one request, and kept while wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.block_order import WINDOW
from stoker.sources.held_blocks import HeldBlocks
from stoker.sources.open_files import FileVersion
from stoker.sources.remote.reader import RemoteFile
from stoker.sources.shards.index import ShardIndex
from stoker.sources.shards.tar_members import HEADER_BYTES
from stoker.sources.source import Indices

RUN_BYTES = 1 << 20
"""Examples that begin in the same so many bytes of a shard are a run."""
KEPT_BYTES = 4 * WINDOW * RUN_BYTES
"""Of runs that are kept: those that a shuffle draws from, and those it drew from before."""
AHEAD_BYTES = 2 * WINDOW * RUN_BYTES
"""Of runs that are read ahead of their use."""


class Runs(NamedTuple):
    """The runs of all shards, one after another."""

    ends: NDArray[np.int64]
    """Of each, the number behind its last example."""
    shards: NDArray[np.int64]
    starts: NDArray[np.int64]
    """In bytes of its shard."""
    stops: NDArray[np.int64]


class Examples(Protocol):
    """The examples that lie in the runs."""

    def locate(self, index: int) -> RemoteFile:
        """Tell where an example is."""
        ...

    def example(self, index: int, data: bytes) -> Any:
        """Make an example of its bytes."""
        ...


class _Run(NamedTuple):
    start: int
    num_rows: int
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class ShardRuns:
    """The runs of one epoch; ``BlockFiles``, and the ``Files`` that are read for these.

    Args:
        runs: of all shards.
        files: of each shard its URL and version.
        examples: what is made of a run.
    """

    def __init__(
        self, runs: Runs, files: Sequence[tuple[str, FileVersion]], examples: Examples
    ) -> None:
        self.held = HeldBlocks(KEPT_BYTES)
        self._runs = runs
        self._shards = files
        self._examples = examples

    def blocks_of(self, indices: Indices) -> NDArray[Any]:
        return np.searchsorted(self._runs.ends, np.asarray(indices, np.int64), side="right")

    def locate(self, index: int) -> RemoteFile:
        _, shards, starts, stops = self._runs
        start, stop = int(starts[index]), int(stops[index])
        url, version = self._shards[int(shards[index])]
        return RemoteFile(None, url, stop - start, start, *version[:2])

    def example(self, index: int, data: bytes) -> _Run:
        """Return a run, of what was read for it."""
        ends = self._runs.ends
        rows = int(ends[index]) - (int(ends[index - 1]) if index else 0)
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
    """Cut shards into runs: of their examples as they are numbered, and no further than a shard."""
    parts, numbered = [], 0
    for number, shard in enumerate(shards):
        starts, stops = spans_of(shard)
        if not len(starts):
            continue
        first = np.flatnonzero(np.diff(starts // RUN_BYTES, prepend=-1))
        ends = np.append(first[1:], len(starts)) + numbered
        parts.append(
            (
                ends,
                np.full(len(ends), number),
                np.minimum.reduceat(starts, first),
                # Of a truncated shard what is there is read; who lies beyond fails by itself.
                np.minimum(np.maximum.reduceat(stops, first), shard.version.size_bytes),
            )
        )
        numbered += len(starts)
    return Runs(*(np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True)))


def spans_of(shard: ShardIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each example begins, with the header of its first file, and where it ends."""
    ends, _, starts, nbytes, inflated_bytes = shard.places
    if not len(ends):
        return ends, ends
    starts = starts - np.where(inflated_bytes < 0, HEADER_BYTES, 0)
    first = np.concatenate([[0], ends[:-1]])
    stops = np.maximum.reduceat(shard.places.starts + nbytes, first)
    return np.minimum.reduceat(starts, first), stops
