"""The probe's files in the folder of the analysis, complete however a process ends.

A process that iterates loaders has ``process-PID.rows``, a mapped file: a header with the
analyzer's commands, then a row for each call of ``next()``. A worker appends a row for each batch
to a file of its own.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from .step_parts import PARTS, spent_ns

# Larger than any batch number, so a loader with it is never replayed or taken over.
NEVER = 1 << 62
# Loaders that a process may have; later ones are not recorded. Scripts have two or three.
SLOTS = 32
# Count of rows, seven to spare, then (replay_at, take_at) of each loader.
HEADER = 8 + 2 * SLOTS
# Calls of next(): 17 minutes at 1 ms. The file is sparse, and has 100 MB if it is full.
_ROWS = 1 << 20
_ROW = struct.Struct(f"{7 + len(PARTS)}q")
_WORK = struct.Struct("7q")

BATCH, END, ERROR, STARTED, SYNCHRONISED = range(5)  # kinds of rows
# Flags on a kind: gradients are on; handed over by the probe; a backward pass began since the row
# before, of the same loader. Bits above the five kinds.
TRAINS, REPLAYED, LEARNED = 16, 32, 64


class Row(NamedTuple):
    """A call of ``next()``, or another event, by ``kind``. Times are of the monotonic clock."""

    slot: int
    epoch: int
    """Counts the iterators of this loader."""
    number: int
    """Counts the batches of this loader, over all iterators."""
    entered_ns: int
    left_ns: int
    kind: int
    cpu_ns: int
    """Processor time of this process, with all its threads; 0 if it was not taken."""
    parts_ns: tuple[int, ...] = (0,) * len(PARTS)
    """Time of each part of a step, in this process so far."""

    @property
    def event(self) -> int:
        """Its kind, without the flags."""
        return self.kind & ~(TRAINS | REPLAYED | LEARNED)

    @property
    def trains(self) -> bool:
        """True if gradients were on."""
        return bool(self.kind & TRAINS)

    @property
    def has_learned(self) -> bool:
        """True if a backward pass began since the row before."""
        return bool(self.kind & LEARNED)

    @property
    def is_replayed(self) -> bool:
        """True if the probe handed the batch over."""
        return bool(self.kind & REPLAYED)


class WorkRecord(NamedTuple):
    """A batch made in a worker, or in a process without workers."""

    pid: int
    worker: int
    started_ns: int
    ended_ns: int
    cpu_ns: int
    """Processor time of the process so far, with all its threads."""
    examples: int
    read_bytes: int
    """Bytes that the process read meanwhile; -1 if they were not counted."""


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Recorder:
    """The rows of this process."""

    def __init__(self, folder: str) -> None:
        self.pid = os.getpid()
        self.base = os.path.join(folder, f"process-{self.pid}")
        with open(self.base + ".rows", "w+b", opener=_open_private) as file:
            file.truncate(8 * HEADER + _ROW.size * _ROWS)  # sparse
            self._map = mmap.mmap(file.fileno(), 0)
        self.header = memoryview(self._map)[: 8 * HEADER].cast("q")
        for index in range(8, HEADER):
            self.header[index] = NEVER
        self._next = itertools.count().__next__  # atomic: loaders may be read by several threads

    def write(
        self, slot: int, epoch: int, number: int, entered: int, left: int, kind: int, cpu: int = 0
    ) -> None:
        """Add a row."""
        at = self._next()
        if at < _ROWS:
            place = 8 * HEADER + _ROW.size * at
            row = (slot, epoch, number, entered, left, kind, cpu)
            _ROW.pack_into(self._map, place, *row, *spent_ns)
            self.header[0] = at + 1


class WatchedRows:
    """The rows of another process, as the analyzer sees them."""

    def __init__(self, path: str) -> None:
        self.base = path.removesuffix(".rows")
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.header = memoryview(self._map)[: 8 * HEADER].cast("q")
        self._rows: list[Row] = []

    def rows(self) -> list[Row]:
        """Return the list of all rows so far. The next call makes this same list longer."""
        start = 8 * HEADER + _ROW.size * len(self._rows)
        end = 8 * HEADER + _ROW.size * self.header[0]
        values = _ROW.iter_unpack(self._map[start:end])
        self._rows.extend(Row._make((*each[:7], each[7:])) for each in values)
        return self._rows

    def close(self) -> None:
        """Give the mapping back."""
        self.header.release()
        self._map.close()


def find_places(slot: int) -> tuple[int, int]:
    """Return the places of a loader's replay_at and take_at in the header."""
    return 8 + 2 * slot, 9 + 2 * slot


def write_work(fd: int, work: WorkRecord) -> None:
    """Append a worker's record."""
    os.write(fd, _WORK.pack(*work))


def read_work(path: str) -> Iterator[WorkRecord]:
    """Read a worker's records; a last one that was cut off is left out."""
    with open(path, "rb") as file:
        content = file.read()
    whole = len(content) - len(content) % _WORK.size
    for values in _WORK.iter_unpack(content[:whole]):
        yield WorkRecord(*values)


def write_json(path: str, value: Any) -> None:
    """Write a small file as a whole or not at all."""
    new = f"{path}.new-{os.getpid()}"
    with open(new, "w") as file:
        json.dump(value, file)
    os.replace(new, path)


def read_json(path: str) -> Any:
    """Read a small file; None if it does not exist yet."""
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None
