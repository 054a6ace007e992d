"""The files inside an archive: what they are called, and at which offsets they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from stoker.sources.open_files import FileVersion

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


class ShardFile(Protocol):
    """A file that is read by offset: ``OpenFile``, or one behind a URL."""

    @property
    def path(self) -> str: ...

    def version(self) -> FileVersion: ...

    def read(self, start: int, nbytes: int) -> bytes: ...


class ArchiveMember(NamedTuple):
    """A regular file in an archive."""

    name: str
    start: int
    """The offset of its first byte; in a zip archive, of its header."""
    nbytes: int
    """How many bytes it takes there."""
    inflated_bytes: int
    """How many bytes it has; -1 where it lies there as it is, in a tar archive."""


ArchiveMembers = Iterator[ArchiveMember]


class DamagedError(ValueError):
    """The rest of an archive cannot be read: it is truncated, or no header is where one must be."""


class UnusableShardError(ValueError):
    """A file that is no archive, or one that cannot be read by offset."""


def compression_of(head: bytes) -> str:
    """Name what an archive was compressed by as a whole, by its first bytes; "" if by nothing."""
    return next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), "")


def refuse_compressed(path: str, head: bytes) -> None:
    """Raise UnusableShardError for an archive that was compressed as a whole."""
    kind = compression_of(head)
    if kind:
        raise UnusableShardError(
            f"{path} is compressed ({kind}) as a whole: nothing in it can be read by its "
            "offset. Decompress it, or copy it to a local disk, where it is read as a stream"
        )
