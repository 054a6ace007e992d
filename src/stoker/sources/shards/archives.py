"""The files inside tar and zip archives: their names and offsets, found by the headers alone.

``tarfile`` and ``zipfile`` read the headers. Of a zip archive only the directory at its end is
read, which holds the offset of each member's header; the header holds the offset of its data. To
read each header while indexing would take a read for each.
"""

from __future__ import annotations

import itertools
import posixpath
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from stoker.sources.files import PartialFile, compression_of

_ASIDE = "__"  # files and folders such as __MACOSX
# The longest magic number of the compressions that are known has six.
_HEAD_BYTES = 8
HEADER_BYTES = tarfile.BLOCKSIZE
# No path is longer than a few KiB; a damaged size is not read into memory.
_LONGEST_NAME = 1 << 20
# Of any file: sums with it fit into an int64.
_MOST_BYTES = 1 << 62
_ZEROS = bytes(HEADER_BYTES)
_TAR_DAMAGE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""The errors of ``tarfile`` for damage."""
_ZIP_DAMAGE = (
    zipfile.BadZipFile,
    NotImplementedError,  # a version that this Python does not know
    OverflowError,  # a place beyond 2^63
    ValueError,  # a negative place; a name that is no UTF-8
    struct.error,
)
"""The errors of ``zipfile`` for damage."""

_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_ZIP_HEADER = struct.Struct("<4s4xH16xHH")  # magic, method, lengths of name and extra field
# Bit 0 of the general purpose flags (APPNOTE 4.4.4).
_ENCRYPTED = 1
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


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


def members_of(file: PartialFile) -> ArchiveMembers:
    """Yield the files of an archive, tar or zip by its first bytes.

    Raises DamagedError after the last whole member; UnusableShardError for what is no archive.
    """
    size = file.version.size_bytes
    if not size:
        raise UnusableShardError(f"{file.path} is empty: it is not a tar archive")
    head = file.read(0, min(_HEAD_BYTES, size))
    if kind := compression_of(head):
        raise UnusableShardError(
            f"{file.path} is compressed ({kind}) as a whole: nothing in it can be read by its "
            f"offset. Decompress it ({kind} -d)"
        )
    return _zip_members(file) if head.startswith(_ZIP_MAGIC) else _tar_members(file)


def _tar_members(file: PartialFile) -> ArchiveMembers:
    """Yield the regular files of an archive, then its links to them; others are passed over.

    A member that reaches beyond the end of the file is yielded, too, before the error.
    """
    size = file.version.size_bytes
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


def _headers(file: PartialFile) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of an archive, and of those behind it (``cat a.tar b.tar``)."""
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
        except _TAR_DAMAGE as error:
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

    def __init__(self, file: PartialFile) -> None:
        self._file, self._size_bytes = file, file.version.size_bytes
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


def _zip_members(file: PartialFile) -> ArchiveMembers:
    """Yield the files of an archive: from the header of each to that of the next."""
    try:
        with zipfile.ZipFile(file.as_file()) as archive:
            found, end = archive.infolist(), archive.start_dir
    except _ZIP_DAMAGE as error:
        raise DamagedError(f"is truncated or damaged: {error}") from error
    for info in found:
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _ZIP_METHODS:
            raise UnusableShardError(
                f"{file.path}: {info.filename!r} is encrypted, or compressed by other means than "
                "deflate: pack the archive anew"
            )
        # Of its maker's system, Unix, the mode.
        if info.create_system == 3 and stat.S_ISLNK(info.external_attr >> 16):
            raise UnusableShardError(
                f"{file.path}: {info.filename!r} is a link: pack the archive anew, without zip's -y"
            )
    starts = sorted({info.header_offset for info in found} | {end})
    if starts[0] < 0:
        raise DamagedError(f"is damaged: a file in it would begin at byte {starts[0]:,}")
    behind = dict(itertools.pairwise(starts))
    for info in found:
        if not info.filename.endswith("/"):
            start = info.header_offset
            nbytes = behind.get(start, start) - start
            yield ArchiveMember(info.filename, start, nbytes, info.file_size)


def unzip(member: bytes, nbytes: int, named: str) -> bytes:
    """Return the data of a member, whose bytes begin with its header. Raises ValueError."""
    magic, method, *lengths = _ZIP_HEADER.unpack_from(member.ljust(_ZIP_HEADER.size, b"\0"))
    begin = _ZIP_HEADER.size + sum(lengths)
    name = member[_ZIP_HEADER.size : _ZIP_HEADER.size + lengths[0]]
    # What is no ASCII is coded in ways of its own.
    if magic != _ZIP_MAGIC[0] or (named.isascii() and name.lower() != named.lower().encode()):
        raise ValueError("the archive has changed since the pipeline was built: build it again")
    if method == zipfile.ZIP_STORED:
        data = member[begin : begin + nbytes]
    else:
        try:
            packed = memoryview(member)[begin:]
            # -15: raw deflate. One byte more than is told shows a file that would go on without
            # end.
            data = zlib.decompressobj(wbits=-15).decompress(packed, nbytes + 1)
        except zlib.error as error:
            raise ValueError(f"its compressed bytes are damaged: {error}") from error
    if len(data) != nbytes:
        raise ValueError(f"{len(data):,} bytes instead of {nbytes:,}")
    return data
