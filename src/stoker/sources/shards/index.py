"""The index of a shard: its examples by number, and the offsets of their files.

Indexes are built several at a time, and kept on disk so that each shard is scanned once.

They lie in the user's cache folder. A file is named by the shard's path, and holds the shard's
version. It may be deleted at any time. An index that cannot be read counts as missing.

A process that writes an index sweeps the folder, at most once a day: it removes indexes that were
not used for a month, and files that a killed process left half written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.basics.resources import user_folder
from stoker.sources.files import FileVersion, PartialFile
from stoker.sources.patterns import Names
from stoker.sources.shards.archives import DamagedError, UnusableShardError, members_of, split_name

# Raised whenever the layout of an index changes: those of other formats are made anew.
_FORMAT = 6
# 128 bits of xxh3: damage goes unnoticed once in 10**38.
_DIGEST_BYTES = 16
_NEW = ".new-"
_SWEPT = ".swept"  # its time says when
# A use is noted, and the folder swept, at most once a day: neither is worth a write in each epoch.
_DAY_S = 86_400.0
# A month: data of a project that rests are not scanned again. Chosen, not measured.
_UNUSED_S = 30 * _DAY_S
# An hour: an index is written in seconds; an older rest was left by a killed process.
_WRITING_S = 3_600.0


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


def build_index(file: PartialFile) -> ShardIndex:
    """Read the headers of a shard, and note damage: examples before it can be read.

    Raises UnusableShardError for what is no shard, or has a field of an example twice; OSError.
    """
    keys: dict[str, int] = {}
    fields: dict[str, int] = {}
    rows = array("q")  # for each file: example, field, start, bytes, inflated bytes
    damage = ""
    try:
        for member in members_of(file):
            named = split_name(member.name)
            if named is not None:  # an example's files need not be consecutive
                example = keys.setdefault(named[0], len(keys))
                field = fields.setdefault(named[1], len(fields))
                rows.extend((example, field, *member[1:]))
    except DamagedError as error:
        damage = str(error)
    names = list(keys)
    places = _places_of(rows, file.path, names, list(fields))
    return ShardIndex(file.path, file.version, Names(names), list(fields), places, damage)


def _places_of(unsorted: array[int], path: str, keys: list[str], fields: list[str]) -> Places:
    rows = np.asarray(unsorted, np.int64).reshape(-1, 5)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    again = np.flatnonzero((rows[1:, :2] == rows[:-1, :2]).all(axis=1))
    if len(again):
        key, field = keys[rows[again[0], 0]], fields[rows[again[0], 1]]
        raise UnusableShardError(
            f"{path}: example {key!r} has {field!r} twice: pack the shard again"
        )
    ends = np.cumsum(np.bincount(rows[:, 0], minlength=len(keys)))
    return Places(ends.astype(np.int64), *map(np.ascontiguousarray, rows.T[1:]))


def index_of(file: PartialFile) -> ShardIndex:
    """Return the kept index of a shard, or a new one, which is kept. Raises as ``build_index``."""
    version = file.version
    index = load_index(file.path, version) if version.is_known else None
    if index is None:
        index = build_index(file)
        if version.is_known:
            save_index(index)
    return index


def show_progress(indexes: Sequence[ShardIndex], of: int) -> bool:
    """Write to a terminal how many shards are indexed; return False if there is none."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # no stderr, or a closed one
        if sys.stderr.isatty():
            examples = sum(len(index.keys) for index in indexes)
            sys.stderr.write(f"index: {len(indexes):,} of {of:,} shards, {examples:,} examples\n")
            sys.stderr.flush()
            return True
    return False


class _Stored(msgspec.Struct, array_like=True):
    format: int
    path: bytes
    version: FileVersion
    damage: str
    keys: bytes
    fields: list[bytes]
    columns: list[bytes]


def index_folder() -> str:
    return os.path.join(user_folder("XDG_CACHE_HOME", "~/.cache"), "stoker", "indexes")


def load_index(path: str, version: FileVersion) -> ShardIndex | None:
    """Return the kept index of this version of a shard, or None."""
    try:
        with open(_file_of(path), "rb") as file:
            digest, content = file.read(_DIGEST_BYTES), file.read()
            if xxhash.xxh3_128_digest(content) != digest:
                return None
            stored = msgspec.msgpack.decode(content, type=_Stored)
            if time.time() - os.fstat(file.fileno()).st_mtime > _DAY_S:
                os.utime(file.fileno())  # it is in use
    except (OSError, msgspec.MsgspecError):
        return None
    if (stored.format, stored.path, stored.version) != (_FORMAT, _real(path), version):
        return None
    places = Places(*(np.frombuffer(column, np.int64) for column in stored.columns))
    keys = Names(_decode(stored.keys).split("\0") if stored.keys else [])
    fields = [_decode(field) for field in stored.fields]
    return ShardIndex(path, version, keys, fields, places, stored.damage)


def save_index(index: ShardIndex) -> None:
    """Write the index of a shard, as a whole or not at all. Without a folder nothing is kept."""
    stored = _Stored(
        _FORMAT,
        _real(index.path),
        index.version,
        index.damage,
        _encode("\0".join(index.keys)),
        [_encode(field) for field in index.fields],
        [column.tobytes() for column in index.places],
    )
    content = msgspec.msgpack.encode(stored)
    with contextlib.suppress(OSError):
        os.makedirs(index_folder(), mode=0o700, exist_ok=True)
        handle, new = tempfile.mkstemp(prefix=_NEW, dir=index_folder())
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(xxhash.xxh3_128_digest(content) + content)
            os.replace(new, _file_of(index.path))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            raise
        _sweep(index_folder())


def _sweep(folder: str) -> None:
    """Remove unneeded indexes, once a day. Other processes may do so at the same time."""
    now = time.time()
    swept = os.path.join(folder, _SWEPT)
    with contextlib.suppress(FileNotFoundError):
        if abs(now - os.stat(swept).st_mtime) < _DAY_S:
            return
    with open(swept, "wb"):
        os.utime(swept)
    for entry in os.scandir(folder):
        if entry.name == _SWEPT:
            continue
        with contextlib.suppress(OSError):
            idle_s = now - entry.stat(follow_symlinks=False).st_mtime
            if idle_s > (_WRITING_S if entry.name.startswith(_NEW) else _UNUSED_S):
                os.unlink(entry.path)


def _file_of(path: str) -> str:
    return os.path.join(index_folder(), xxhash.xxh3_128_hexdigest(_real(path)))


def _real(path: str) -> bytes:
    return _encode(path if "://" in path else os.path.realpath(path))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
