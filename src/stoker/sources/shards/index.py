"""The index of a shard: its examples by number, and the offsets of their files."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.sources.files import FileVersion
from stoker.sources.patterns import Names
from stoker.sources.shards.members import (
    ArchiveMember,
    DamagedError,
    ShardFile,
    UnusableShardError,
    refuse_compressed,
    split_name,
)
from stoker.sources.shards.tar_members import tar_members
from stoker.sources.shards.zip_members import MAGIC, zip_members


class Places(NamedTuple):
    """The offsets of a shard's files: a row for each, an example's rows together."""

    ends: NDArray[np.int64]
    """For each example, the number of its last file and one."""
    fields: NDArray[np.int64]
    """Numbers of fields."""
    starts: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    inflated_bytes: NDArray[np.int64]


class ShardIndex(NamedTuple):
    """The examples of a shard, in the order of their first files."""

    path: str
    version: FileVersion
    keys: Names
    """The example's key: its files' common name up to the first dot of the last component."""
    fields: list[str]
    """The fields: the names' parts after that dot, over all examples."""
    places: Places
    damage: str
    """The shard's damage, or ""."""

    def files_of(self, example: int) -> dict[str, list[int]]:
        """Return start, bytes and inflated bytes (or -1) for each field of an example."""
        ends, *columns = self.places
        span = slice(int(ends[example - 1]) if example else 0, int(ends[example]))
        rows = zip(*(column[span].tolist() for column in columns), strict=True)
        return {self.fields[number]: place for number, *place in rows}

    def incomplete(self) -> str | None:
        """Return the key of the first example that reaches beyond the shard's end, if any."""
        at = self.places
        beyond = np.flatnonzero(at.starts + at.nbytes > self.version.size_bytes)
        if not len(beyond):
            return None
        key: str = self.keys[int(np.searchsorted(at.ends, beyond[0], side="right"))]
        return key


def build_index(file: ShardFile) -> ShardIndex:
    """Read the headers of a shard.

    The index notes damage: examples before it can be read.

    Raises UnusableShardError for a file that is not a shard, and for a shard in which an example
    has a field twice; OSError.
    """
    path, version = file.path, file.version()
    if not version.size_bytes:
        raise UnusableShardError(f"{path} is empty: it is not a tar archive")
    head = file.read(0, min(8, version.size_bytes))
    refuse_compressed(path, head)
    found = zip_members(file) if head.startswith(MAGIC) else tar_members(file)
    grouping = _Grouping(path)
    damage = ""
    try:
        for member in found:
            grouping.add(member)
    except DamagedError as error:
        damage = str(error)
    return ShardIndex(
        path, version, Names(grouping.keys), grouping.fields, grouping.places(), damage
    )


class _Grouping:
    """Collects files by key; an example's files need not be consecutive."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._keys: dict[str, int] = {}
        self._fields: dict[str, int] = {}
        # A row for each file: example, field, start, bytes, inflated bytes.
        self._rows = array("q")

    @property
    def keys(self) -> list[str]:
        return list(self._keys)

    @property
    def fields(self) -> list[str]:
        return list(self._fields)

    def add(self, member: ArchiveMember) -> None:
        named = split_name(member.name)
        if named is not None:
            example = self._keys.setdefault(named[0], len(self._keys))
            field = self._fields.setdefault(named[1], len(self._fields))
            self._rows.extend((example, field, *member[1:]))

    def places(self) -> Places:
        rows = np.frombuffer(self._rows, np.int64).reshape(-1, 5) if self._rows else _NO_ROWS
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        again = np.flatnonzero((rows[1:, :2] == rows[:-1, :2]).all(axis=1))
        if len(again):
            key, field = self.keys[rows[again[0], 0]], self.fields[rows[again[0], 1]]
            raise UnusableShardError(
                f"{self._path}: example {key!r} has {field!r} twice: pack the shard again"
            )
        ends = np.cumsum(np.bincount(rows[:, 0], minlength=len(self._keys)))
        return Places(ends.astype(np.int64), *map(np.ascontiguousarray, rows.T[1:]))


_NO_ROWS: NDArray[np.int64] = np.empty((0, 5), np.int64)
