"""The members of a tar archive, found by their headers alone, which ``tarfile`` reads."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from typing import Any

from stoker.sources.shards.members import (
    ArchiveMember,
    ArchiveMembers,
    DamagedError,
    ShardFile,
    UnusableShardError,
    split_name,
)

HEADER_BYTES = tarfile.BLOCKSIZE
# No path is longer than a few KiB; a damaged size is not read into memory.
_LONGEST_NAME = 1 << 20
# Of any file: sums with it fit into an int64.
_MOST_BYTES = 1 << 62
_ZEROS = bytes(HEADER_BYTES)
_DAMAGE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""The errors of ``tarfile`` for damage."""


def tar_members(file: ShardFile) -> ArchiveMembers:
    """Yield the regular files of an archive, then its links to them; others are passed over.

    A member that reaches beyond the end of the file is yielded, too, before the error.

    Raises DamagedError; UnusableShardError for what is not a tar archive, for sparse files, and
    for a link to what the archive does not hold.
    """
    size = file.version().size_bytes
    files: dict[str, ArchiveMember] = {}
    links: dict[str, tuple[str, str]] = {}
    damage: DamagedError | None = None
    try:
        for info in _headers(file):
            name = posixpath.normpath(info.name)
            if info.islnk() or info.issym():
                folder = posixpath.dirname(info.name) if info.issym() else ""
                links[name] = info.name, posixpath.join(folder, info.linkname)
            elif info.isreg():
                files[name] = member = ArchiveMember(info.name, info.offset_data, info.size, -1)
                yield member
                if member.start + member.nbytes > size:
                    raise DamagedError(
                        f"is truncated: it ends at byte {size:,}, and {info.name!r} at byte "
                        f"{member.start + member.nbytes:,}"
                    )
    except DamagedError as error:
        damage = error
    for name, target in links.values():
        seen = set()
        found = posixpath.normpath(target)
        while found in links and found not in seen:
            seen.add(found)
            found = posixpath.normpath(links[found][1])
        if found in files:
            yield files[found]._replace(name=name)
        elif damage is None and split_name(name) is not None:
            raise UnusableShardError(
                f"{file.path}: {name!r} is a link to {target!r}, which is no file in the archive: "
                "pack it again with tar's --dereference and --hard-dereference"
            )
    if damage is not None:
        raise damage


def _headers(file: ShardFile) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of an archive, and of those behind it (``cat a.tar b.tar``).

    Raises as ``tar_members``.
    """
    raw: Any = _Blocks(file)
    is_first, last = True, b"-"
    while last:
        any_header = False
        try:
            tar: Any = tarfile.TarFile(fileobj=raw, encoding="utf-8")
            while (info := tar.next()) is not None:
                any_header = True
                if info.issparse():
                    raise UnusableShardError(
                        f"{file.path} holds sparse files: pack it without --sparse"
                    )
                if not 0 <= info.size < _MOST_BYTES:
                    raise DamagedError(f"is damaged: a size of {info.size:,} at {info.offset:,}")
                yield info
                tar.members = []  # it would keep all of them
                raw.seek(tar.offset)  # else it reads a byte of each content to see its end
        except (UnusableShardError, DamagedError):
            raise
        except _DAMAGE as error:
            if is_first and not any_header:
                raise UnusableShardError(
                    f"{file.path} is not a tar archive (nor a zip archive): {error}"
                ) from error
            raise DamagedError(f"is truncated or damaged: {error}") from error
        # A damaged header, too, is an end to ``tarfile``; what is behind an archive's end may be
        # anything.
        raw.seek(tar.offset)
        last = raw.read(HEADER_BYTES)
        if last not in (b"", _ZEROS) and (is_first or any_header):
            if len(last) == HEADER_BYTES:
                raise DamagedError(f"is damaged: there is no header at byte {tar.offset:,}")
            raise DamagedError(f"is truncated: a header at byte {tar.offset:,} is cut off")
        if last != _ZEROS:
            return
        while last == _ZEROS:
            last = raw.read(HEADER_BYTES)
        raw.seek(raw.tell() - len(last))
        is_first = False


def is_header(head: bytes, nbytes: int) -> bool:
    """True if a block is the header of a file of this size."""
    try:
        size = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape").size
    except tarfile.TarError:
        return False
    # Of more than 8 GiB another header may tell the size.
    return size == nbytes or nbytes >= 1 << 33


class _Blocks:
    """A shard as ``tarfile`` reads it."""

    def __init__(self, file: ShardFile) -> None:
        self._file, self._size_bytes = file, file.version().size_bytes
        self._at, self._has_ended = 0, False

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> None:
        self._at, self._has_ended = at, False

    def read(self, nbytes: int) -> bytes:
        # Behind the end ``tarfile`` may read on for ever.
        if not 0 <= nbytes <= _LONGEST_NAME or self._has_ended:
            raise DamagedError("is truncated or damaged: a header goes on behind its end")
        there = min(nbytes, self._size_bytes - self._at)
        self._has_ended = self._at >= self._size_bytes
        data = self._file.read(self._at, there) if there > 0 else b""
        self._at += len(data)
        return data
