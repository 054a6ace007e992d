"""Tar shards that were compressed as a whole: a stream, since their files have no offsets."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from stoker.basics.validate import names_in
from stoker.sources.files import FileVersion, OpenFile, refuse_too_large
from stoker.sources.iterable import IterableSource
from stoker.sources.patterns import Paths, describe_paths, find_files
from stoker.sources.shards.members import (
    DamagedError,
    UnusableShardError,
    compression_of,
    split_name,
)
from stoker.sources.shards.shard_source import KEY, missing_field
from stoker.sources.shards.tar_members import tar_headers

_OPEN: dict[str, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
# The longest magic number of the compressions that are known has six.
_HEAD_BYTES = 8
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError)


def find_compressed(shards: Paths) -> dict[str, str]:
    """Return the files that are compressed as a whole, with their kinds of compression.

    Raises FileNotFoundError, ValueError, TypeError as ``find_files`` does.
    """
    kinds = {}
    for path in find_files(shards, "from_tar"):
        file = OpenFile(path)
        kind = compression_of(file.read(0, min(_HEAD_BYTES, file.version().size_bytes)))
        if kind:
            kinds[path] = kind
    return kinds


class CompressedTarSource(IterableSource):
    """The examples of compressed tar shards, one after another; it has its own state.

    Raises ValueError where some shards are not compressed, or in a way that Python cannot read.
    """

    def __init__(self, shards: Paths, fields: Sequence[str] | None) -> None:
        self._shown = describe_paths(shards)
        super().__init__(_Shards(find_files(shards, "from_tar"), fields))

    @property
    def name(self) -> str:
        return f"from_tar({self._shown})"

    def extent(self, *, is_followed: bool) -> str:
        return "compressed shards: a stream with a state of its own, no length"


class _Shards:
    """The iterable. A state is the current shard, and how many of its examples were read."""

    def __init__(self, paths: list[str], fields: Sequence[str] | None) -> None:
        self._fields = None if fields is None else names_in("fields", fields, "['jpg', 'cls']")
        self._shards = [(path, OpenFile(path).version(), _opener(path)) for path in paths]
        self._at = self._begin = (0, 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        (first, skipped), self._begin = self._begin, (0, 0)
        for shard, (path, version, opener) in enumerate(self._shards):
            if shard < first:
                continue
            for number, example in enumerate(_examples(path, version, opener)):
                self._at = (shard, number + 1)
                if shard > first or number >= skipped:
                    yield self._choose(path, example)

    def state_dict(self) -> dict[str, int]:
        return {"shard": self._at[0], "examples": self._at[1]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = (state["shard"], state["examples"])

    def _choose(self, path: str, example: dict[str, Any]) -> dict[str, Any]:
        for field in self._fields or ():
            if field not in example:
                raise missing_field(path, example[KEY], field, [f for f in example if f != KEY])
        return example if self._fields is None else {n: example[n] for n in (KEY, *self._fields)}


def _examples(path: str, version: FileVersion, opener: Any) -> Iterator[dict[str, Any]]:
    """Yield consecutive files with the same key."""
    if OpenFile(path).version() != version:
        raise ValueError(f"{path} has changed since the pipeline was built: build it again")
    example: dict[str, Any] = {}
    ended: set[str] = set()
    try:
        with opener(path, "rb") as raw:
            for member in tar_headers(raw, path):
                named = split_name(member.name)
                is_link = member.islnk() or member.issym()
                if named is None or not (member.isreg() or is_link):
                    continue
                if is_link:
                    raise _unstreamable(path, f"{member.name!r} is a link")
                key, field = named
                if example and example[KEY] != key:
                    ended.add(example[KEY])
                    yield example
                    example = {}
                if key in ended:
                    raise _unstreamable(path, f"other files lie between those of example {key!r}")
                if field in example:
                    raise UnusableShardError(
                        f"{path}: example {key!r} has {field!r} twice: pack the shard again"
                    )
                refuse_too_large(member.size, path)
                content = raw.read(member.size)
                if len(content) < member.size:
                    raise DamagedError(f"is truncated: {member.name!r} is not all there")
                example = {KEY: key, **example, field: content}
    except DamagedError as error:
        raise ValueError(f"{path} {error}") from error
    except _DAMAGE as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    if example:
        yield example


def _unstreamable(path: str, what: str) -> UnusableShardError:
    return UnusableShardError(
        f"{path}: {what}, and a compressed archive is read from its beginning to its end: "
        "decompress it, and it is read by number"
    )


def _opener(path: str) -> Any:
    file = OpenFile(path)
    version: FileVersion = file.version()
    kind = compression_of(file.read(0, min(_HEAD_BYTES, version.size_bytes)))
    if not kind:
        raise ValueError(
            f"{path} is not compressed, but others are: read the uncompressed ones alone, by number"
        )
    if kind not in _OPEN:
        raise ValueError(
            f"{path} is compressed by {kind}, which Python does not read: decompress it"
        )
    return _OPEN[kind]
