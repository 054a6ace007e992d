"""The members of a tar archive (ustar, GNU and pax), found by their headers alone.

Python's ``tarfile`` makes an object with twenty attributes for each header; a million take minutes.
"""

from __future__ import annotations

from stoker.sources.shards.members import (
    ArchiveMember,
    ArchiveMembers,
    DamagedError,
    ShardFile,
    UnusableShardError,
)

# Of tar's format: headers and contents fill blocks of 512 bytes.
HEADER_BYTES = 512
_REGULAR = (b"0", b"\0", b"7")
# No path is longer than a few KiB; a damaged size is not read into memory.
_LONGEST_NAME = 1 << 20
# Of any file: sums with it fit into an int64.
_MOST_BYTES = 1 << 62
_ZEROS = bytes(HEADER_BYTES)


def tar_members(file: ShardFile) -> ArchiveMembers:
    """Yield the regular files of an archive; links, folders and devices are passed over.

    If another archive follows its end (``cat a.tar b.tar``), that is read, too.

    A member that reaches beyond the end of the file is yielded, too, before the error.

    Raises DamagedError; UnusableShardError for a file that is not a tar archive or has sparse
    files.
    """
    size = file.version().size_bytes
    at = 0
    long_name: str | None = None
    long_size: int | None = None
    has_ended = False
    while at < size:
        if size - at < HEADER_BYTES and has_ended:
            return
        if size - at < HEADER_BYTES:
            raise DamagedError(f"is truncated: a header at byte {at:,} is cut off")
        head = file.read(at, HEADER_BYTES)
        if head == _ZEROS:
            has_ended, at = True, at + HEADER_BYTES
            continue
        if not is_header(head):
            if has_ended:
                return
            if at == 0:
                raise UnusableShardError(f"{file.path} is not a tar archive (nor a zip archive)")
            raise DamagedError(f"is damaged: there is no header at byte {at:,}")
        has_ended = False
        # Offsets of ustar's header: checksum 148, type 156, size 124.
        kind = head[156:157]
        nbytes, start = _number(head[124:136]), at + HEADER_BYTES
        if kind in (b"L", b"x"):
            if nbytes > min(_LONGEST_NAME, size - start):
                raise DamagedError(f"is truncated or damaged: a long name at byte {at:,}")
            content = file.read(start, nbytes)
            if kind == b"L":
                long_name = _text(content)
            else:
                records = _pax(content)
                if any(key.startswith("GNU.sparse") for key in records):
                    raise _sparse(file.path)
                long_name = records.get("path", long_name)
                long_size = _extended_size(records, at)
        else:
            if kind == b"S":
                raise _sparse(file.path)
            name = long_name or _name(head)
            if kind in _REGULAR:
                nbytes = nbytes if long_size is None else long_size
                if not name.endswith("/"):
                    yield ArchiveMember(name, start, nbytes, -1)
            elif kind not in (b"g", b"K"):
                nbytes = 0 if kind in b"123456" else nbytes
            if kind not in (b"g", b"K"):
                long_name = long_size = None
        at = start + -(-nbytes // HEADER_BYTES) * HEADER_BYTES
        if start + nbytes > size:
            raise DamagedError(
                f"is truncated: it ends at byte {size:,}, and {_name(head)!r} at byte "
                f"{start + nbytes:,}"
            )


def is_header(head: bytes, nbytes: int | None = None) -> bool:
    """True if a block is a header, of a file of this size if given."""
    try:
        checksum, size = _number(head[148:156]), _number(head[124:136])
    except (ValueError, IndexError):
        return False
    # Of more than 8 GiB another header may tell the size.
    fits = nbytes is None or size == nbytes or nbytes >= 1 << 33
    # The checksum is of the header with eight blanks in its own place.
    return fits and sum(head) - sum(head[148:156]) + 8 * 32 == checksum


def _number(field: bytes) -> int:
    """Read an octal number, or one in binary where the first bit says so.

    Raises ValueError for other text, a negative number, and an impossible size.
    """
    if field[0] & 0x80:
        number = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if number > _MOST_BYTES:  # a negative one, too: its first bits are all set
            raise ValueError(f"{number} is no size")
        return number
    digits = field.split(b"\0", 1)[0].strip() or b"0"
    if not digits.isdigit():  # int() takes signs and underscores
        raise ValueError(f"{digits!r} is no octal number")
    return int(digits, 8)


def _extended_size(records: dict[str, str], at: int) -> int | None:
    """Return the size in an extended header, or None."""
    text = records.get("size")
    if text is None:
        return None
    # 18 digits fit into an int64.
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise DamagedError(f"is damaged: the header at byte {at:,} tells a size of {text[:20]!r}")
    return int(text)


def _name(head: bytes) -> str:
    name = _text(head[:100])
    prefix = _text(head[345:500]) if head[257:263] == b"ustar\0" else ""  # GNU has others there
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes) -> dict[str, str]:
    """Read records such as ``30 path=a/very/long/name.jpg``."""
    records = {}
    at = 0
    while at < len(content):
        length, space, _ = content[at : at + 20].partition(b" ")
        if not space or not length.isdigit() or int(length) <= len(length):
            break
        record = content[at + len(length) + 1 : at + int(length) - 1]
        key, _, value = record.partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += int(length)
    return records


def _sparse(path: str) -> UnusableShardError:
    return UnusableShardError(f"{path} holds sparse files: pack it without --sparse")
