"""The members of a zip archive, from its central directory."""

from __future__ import annotations

import struct
import zipfile
import zlib

from stoker.sources.shards.members import (
    ArchiveMember,
    ArchiveMembers,
    DamagedError,
    ShardFile,
    UnusableShardError,
)

MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_HEADER_BYTES = 30
_ENCRYPTED = 1


def zip_members(file: ShardFile) -> ArchiveMembers:
    """Yield the files of a local archive.

    Raises DamagedError; UnusableShardError for files that are encrypted, or compressed by other
    means than deflate, and for an archive at a URL.
    """
    if "://" in file.path:
        raise UnusableShardError(f"{file.path} is a zip archive: copy it to a local disk")
    try:
        with zipfile.ZipFile(file.path) as archive:
            found = archive.infolist()
    except zipfile.BadZipFile as error:
        raise DamagedError(f"is truncated or damaged: {error}") from error
    for info in found:
        if info.is_dir():
            continue
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        if info.flag_bits & _ENCRYPTED or not (
            deflated or info.compress_type == zipfile.ZIP_STORED
        ):
            raise UnusableShardError(
                f"{file.path}: {info.filename!r} is encrypted, or compressed by other means than "
                "deflate: pack the archive anew"
            )
        # The name is there again, with an extra field that may be of another length.
        head = file.read(info.header_offset, _HEADER_BYTES)
        lengths = struct.unpack("<HH", head[26:])
        start = info.header_offset + _HEADER_BYTES + sum(lengths)
        yield ArchiveMember(
            info.filename, start, info.compress_size, info.file_size if deflated else -1
        )


def inflate(data: bytes, nbytes: int) -> bytes:
    """Decompress a file. Raises ValueError for what are not so many bytes, or is damaged."""
    try:
        inflated = zlib.decompress(data, wbits=-15, bufsize=nbytes or 1)
    except zlib.error as error:
        raise ValueError(f"its compressed bytes are damaged: {error}") from error
    if len(inflated) != nbytes:
        raise ValueError(f"{len(inflated):,} bytes instead of {nbytes:,}")
    return inflated
