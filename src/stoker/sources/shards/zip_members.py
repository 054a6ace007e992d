"""The members of a zip archive, from its central directory.

The directory holds the offset of each member's header, and the header the offset of its data. Only
the first is kept: reading each header while indexing would take a read for each.
"""

from __future__ import annotations

import io
import itertools
import stat
import struct
import zipfile
import zlib

from stoker.sources.shards.members import (
    ArchiveMember,
    ArchiveMembers,
    DamagedError,
    SeekableShard,
    ShardFile,
    UnusableShardError,
)

_DAMAGE = (
    zipfile.BadZipFile,
    NotImplementedError,  # a version that this Python does not know
    OverflowError,  # a place beyond 2^63
    ValueError,  # a negative place; a name that is no UTF-8
    struct.error,
)
"""The errors of ``zipfile`` for damage."""

MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_HEADER = struct.Struct("<4s4xH16xHH")  # magic, method, lengths of name and extra field
# Bit 0 of the general purpose flags (APPNOTE 4.4.4).
_ENCRYPTED = 1


def zip_members(file: ShardFile) -> ArchiveMembers:
    """Yield the files of an archive: from the header of each to that of the next.

    Raises DamagedError; UnusableShardError for files that are encrypted, links, or not compressed
    by deflate.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(SeekableShard(file))) as archive:
            found, end = archive.infolist(), archive.start_dir
    except _DAMAGE as error:
        raise DamagedError(f"is truncated or damaged: {error}") from error
    for info in found:
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
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


_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def unzip(member: bytes, nbytes: int, named: str) -> bytes:
    """Return the data of a member, whose bytes begin with its header.

    Raises ValueError for a wrong size, damage, or another member.
    """
    magic, method, *lengths = _HEADER.unpack_from(member.ljust(_HEADER.size, b"\0"))
    begin = _HEADER.size + sum(lengths)
    name = member[_HEADER.size : _HEADER.size + lengths[0]]
    # What is no ASCII is coded in ways of its own.
    if magic != MAGIC[0] or (named.isascii() and name.lower() != named.lower().encode()):
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
