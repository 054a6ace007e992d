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
    SeekableShard,
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

    Raises as ``tar_headers`` does, and UnusableShardError for a link to what the archive does not
    hold.
    """
    size = file.version().size_bytes
    files: dict[str, ArchiveMember] = {}
    links: dict[str, tuple[str, str]] = {}
    damage: DamagedError | None = None
    try:
        for info in tar_headers(SeekableShard(file), file.path):
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


def tar_headers(raw: Any, path: str) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of an archive, and of those behind it (``cat a.tar b.tar``).

    The caller may move in the file, and reads what it wants before it asks for the next header.

    Raises DamagedError; UnusableShardError for what is not a tar archive or has sparse files.
    """
    blocks: Any = _Blocks(raw)
    is_first = True
    while True:
        any_header = False
        try:
            tar: Any = tarfile.TarFile(fileobj=blocks, encoding="utf-8")
            while (info := tar.next()) is not None:
                any_header = True
                if info.issparse():
                    raise UnusableShardError(f"{path} holds sparse files: pack it without --sparse")
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
                    f"{path} is not a tar archive (nor a zip archive): {error}"
                ) from error
            raise DamagedError(f"is truncated or damaged: {error}") from error
        # A damaged header, too, is an end to it.
        if blocks.last != _ZEROS:
            if not blocks.last or not (is_first or any_header):
                return
            if len(blocks.last) == HEADER_BYTES:
                raise DamagedError(f"is damaged: there is no header at byte {tar.offset:,}")
            raise DamagedError(f"is truncated: a header at byte {tar.offset:,} is cut off")
        while blocks.last == _ZEROS:
            blocks.read(HEADER_BYTES)
        if not blocks.last:
            return
        raw.seek(-len(blocks.last), 1)
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
    """What ``tarfile`` reads an archive through: it shows the last block that was read."""

    def __init__(self, raw: Any) -> None:
        self._raw, self.last = raw, b"-"
        self.seek, self.tell = raw.seek, raw.tell

    def read(self, nbytes: int) -> bytes:
        # Behind the end ``tarfile`` may read on for ever.
        if not 0 <= nbytes <= _LONGEST_NAME or not self.last:
            raise DamagedError("is truncated or damaged: a header goes on behind its end")
        self.last = self._raw.read(nbytes)
        return self.last
