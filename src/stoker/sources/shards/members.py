"""The files inside an archive: their names and offsets, and how their headers are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from stoker.sources.files import FileVersion, OpenFile, SeekableFile

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
# A disk reads 64 KiB in a fraction of a seek's time; in archives of small files many headers lie in
# it.
_AHEAD_BYTES = 1 << 16
_ASIDE = "__"  # files and folders such as __MACOSX


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
    """Its bytes in the archive."""
    inflated_bytes: int
    """Its uncompressed bytes; -1 where it is stored as it is, in a tar archive."""


ArchiveMembers = Iterator[ArchiveMember]


class DamagedError(ValueError):
    """The rest of an archive cannot be read: it is truncated, or a header is missing."""


class UnusableShardError(ValueError):
    """A file that is not an archive, or an archive that cannot be read by offset."""


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and field, as WebDataset does; None without a suffix."""
    folder, slash, last = name.rpartition("/")
    stem, dot, field = last.partition(".")
    if not stem or not dot or (stem + dot).startswith(_ASIDE) or folder.startswith(_ASIDE):
        return None
    return folder + slash + stem, field.lower()


def compression_of(head: bytes) -> str:
    """Return the command that compressed a whole file, from its first bytes; "" for none."""
    return next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), "")


def refuse_compressed(path: str, head: bytes) -> None:
    """Raise UnusableShardError for an archive that was compressed as a whole."""
    kind = compression_of(head)
    if kind:
        raise UnusableShardError(
            f"{path} is compressed ({kind}) as a whole: nothing in it can be read by its offset. "
            f"Decompress it ({kind} -d)"
        )


class HeaderReads:
    """A ``ShardFile`` that is read from its beginning to its end, by one thread.

    If the next header is within so many bytes, that much is read at once: slow storage then needs
    one seek. Headers of large files are read alone.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = OpenFile(path)
        self._size_bytes = self._file.version().size_bytes
        self._held, self._start, self._last = b"", 0, -_AHEAD_BYTES

    def version(self) -> FileVersion:
        return self._file.version()

    def read(self, start: int, nbytes: int) -> bytes:
        within = start - self._start
        if not 0 <= within <= len(self._held) - nbytes:
            near = 0 <= start - self._last < _AHEAD_BYTES
            ahead = min(_AHEAD_BYTES, self._size_bytes - start) if near else 0
            self._start, within = start, 0
            self._held = self._file.read(start, max(nbytes, ahead))
        self._last = start
        return self._held[within : within + nbytes]


class SeekableShard(SeekableFile):
    """A file read by offset, in the form that ``zipfile`` needs."""

    def __init__(self, file: ShardFile) -> None:
        super().__init__(file.version().size_bytes)
        self._file = file

    def readinto(self, buffer: Any) -> int:
        nbytes = max(0, min(len(buffer), self._size - self._at))
        if nbytes:
            buffer[:nbytes] = self._file.read(self._at, nbytes)
        self._at += nbytes
        return nbytes
