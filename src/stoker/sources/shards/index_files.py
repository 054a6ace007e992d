"""Indexes of shards on disk, in the user's cache folder, so that each shard is scanned once.

A file is named by the shard's path, and tells the version of the shard that it was made of. It may
be deleted at any time. What cannot be read, for whatever reason, is as good as not there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

import msgspec
import numpy as np
import xxhash

from stoker.sources.names import Names
from stoker.sources.open_files import FileVersion
from stoker.sources.shards.index import Places, ShardIndex

_FORMAT = 1
_DIGEST_BYTES = 16


class _Stored(msgspec.Struct, array_like=True):
    format: int
    path: str
    size_bytes: int
    modified_ns: int
    damage: str
    keys: bytes
    fields: list[bytes]
    columns: list[bytes]


def index_folder() -> str:
    """Return where indexes lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "stoker", "indexes")


def load_index(path: str, version: FileVersion) -> ShardIndex | None:
    """Return the index of a shard, None where there is none of this version."""
    try:
        with open(_file_of(path), "rb") as file:
            found = file.read()
        digest, content = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        if xxhash.xxh3_128_digest(content) != digest:
            return None
        stored = msgspec.msgpack.decode(content, type=_Stored)
    except (OSError, msgspec.MsgspecError):
        return None
    told = FileVersion(stored.size_bytes, stored.modified_ns)
    if (stored.format, stored.path, told) != (_FORMAT, _real(path), version):
        return None
    if len(stored.columns) != len(Places._fields):
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
        *index.version,
        index.damage,
        _encode("\0".join(index.keys)),
        [_encode(field) for field in index.fields],
        [column.tobytes() for column in index.places],
    )
    content = msgspec.msgpack.encode(stored)
    with contextlib.suppress(OSError):
        os.makedirs(index_folder(), mode=0o700, exist_ok=True)
        handle, new = tempfile.mkstemp(prefix=".new-", dir=index_folder())
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(xxhash.xxh3_128_digest(content) + content)
            os.replace(new, _file_of(index.path))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            raise


def _file_of(path: str) -> str:
    name = xxhash.xxh3_128_hexdigest(_encode(_real(path)))
    return os.path.join(index_folder(), name)


def _real(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
