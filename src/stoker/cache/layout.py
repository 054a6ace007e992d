"""Layout of a store's LMDB table: its keys and values, and their checks.

One table, three kinds of keys. 16 bytes: an item, with its number, its checksum and its record, or
the record's place; ``p`` and a number: a pack, which small items share, since LMDB gives whole
pages to values of more than half a page; ``c``: the totals. No entry is ever deleted, and only the
totals are replaced. (Named tables would have to be opened in a transaction that waits for writers.)
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import xxhash

# 128 bits: two of 10^9 examples share a key with a probability of 10^-21.
KEY_BYTES = 16
PACK_BYTES = 1 << 16
"""Items of less share a pack of about so many bytes. LMDB rounds an item up to pages: alone,
items of 1,900 bytes took 2.17 times their size, packed they share its pages."""
# LMDB takes the system's pages as its own; 4 KiB are usual.
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# Of LMDB, in front of an item that takes whole pages.
PAGE_HEADER_BYTES = 16
_ENTRY = struct.Struct("<QQq")  # number, checksum, pack; an item of its own follows
# No pack has it: they are numbered from 0.
_NO_PACK = -1
_SPAN = struct.Struct("<QQ")  # start and length within a pack
_PACK_KEY = struct.Struct(">cQ")
_TOTALS = struct.Struct("<QQQ")  # items, packs, bytes of the items
_TOTALS_KEY = b"c"


class StoredItem(NamedTuple):
    """An item that may enter a store."""

    key: bytes
    """16 bytes that identify it."""
    record: list[bytes]
    """The stored bytes, in pieces."""
    size_bytes: int
    """The checksum of all pieces."""
    user: tuple[int, int]
    """The user that offers it."""
    file: str | None = None
    """A local file that the page cache may forget once the item is stored."""


def checksum_of(key: bytes, *record: bytes | memoryview) -> int:
    """Return the checksum of an item; it covers the key, so it matches no other item."""
    hashed = xxhash.xxh3_64(key)
    for piece in record:
        hashed.update(piece)
    return hashed.intdigest()


def find_entry(txn: Any, key: bytes) -> tuple[int, int, memoryview | None] | None:
    """Return an item's number, checksum and record; None if it is missing.

    The record is LMDB's own memory; None where the table is damaged.
    """
    entry: memoryview | None = txn.get(key)
    if entry is None:
        return None
    number, checksum, pack = _ENTRY.unpack_from(entry)
    if pack == _NO_PACK:
        return number, checksum, entry[_ENTRY.size :]
    start, length = _SPAN.unpack_from(entry, _ENTRY.size)
    content = txn.get(_PACK_KEY.pack(b"p", pack))
    return number, checksum, None if content is None else content[start : start + length]


def put_items(txn: Any, items: Iterable[StoredItem]) -> tuple[int, int]:
    """Write items with new keys; return the table's number of items, and their bytes."""
    count, packs, payload_bytes = _read_totals(txn)
    for group in _group(items):
        if len(group) == 1 and group[0].size_bytes >= PACK_BYTES:
            _put_alone(txn, count, group[0])
        else:
            _put_pack(txn, count, packs, group)
            packs += 1
        count += len(group)
        payload_bytes += sum(item.size_bytes for item in group)
    txn.put(_TOTALS_KEY, _TOTALS.pack(count, packs, payload_bytes))
    return count, payload_bytes


def list_keys(txn: Any) -> list[bytes]:
    keys = txn.cursor().iternext(values=False)
    return [bytes(key) for key in keys if len(key) == KEY_BYTES]


def find_disorder(txn: Any, limit_bytes: int) -> str:
    """Read through a table that may be damaged, and return the damage found, or "".

    Raises struct.error or LMDB's errors where it cannot be read. May crash the process.
    """
    (items, _, _), entries = _read_totals(txn), txn.stat()["entries"]
    numbers = bytearray(min(items, entries))
    pack_bytes: dict[int, int] = {}
    last, count = b"", 0
    for key, content in txn.cursor():
        name = bytes(key)
        if name <= last or len(content) > limit_bytes:
            return "its items are in disorder"
        last = name
        count += 1
        if len(name) == _PACK_KEY.size:
            pack_bytes[_PACK_KEY.unpack(name)[1]] = len(content)
    for key, entry in txn.cursor():
        if len(key) != KEY_BYTES:
            continue
        number, _, pack = _ENTRY.unpack_from(entry)
        if number >= len(numbers) or numbers[number]:
            return f"item {bytes(key).hex()} has a number that cannot be"
        numbers[number] = 1
        if pack != _NO_PACK:
            start, length = _SPAN.unpack_from(entry, _ENTRY.size)
            if start + length > pack_bytes.get(pack, -1):
                return f"item {bytes(key).hex()} lies outside of its pack"
    if count != entries or not all(numbers) or len(numbers) != items:
        return "items are missing"
    return ""


def _read_totals(txn: Any) -> tuple[int, int, int]:
    return _TOTALS.unpack(txn.get(_TOTALS_KEY) or bytes(_TOTALS.size))


def _group(items: Iterable[StoredItem]) -> list[list[StoredItem]]:
    """Put small items together into packs that fill their pages; large ones stay alone."""
    packs: list[list[StoredItem]] = []
    small: list[StoredItem] = []
    room = PACK_BYTES - PAGE_HEADER_BYTES
    for item in items:
        if item.size_bytes >= PACK_BYTES:
            packs.append([item])
            continue
        if small and item.size_bytes > room:
            packs.append(small)
            small, room = [], PACK_BYTES - PAGE_HEADER_BYTES
        small.append(item)
        room -= item.size_bytes
    return packs + [small] * bool(small)


def _put_alone(txn: Any, number: int, item: StoredItem) -> None:
    entry = _ENTRY.pack(number, checksum_of(item.key, *item.record), _NO_PACK)
    txn.put(item.key, b"".join([entry, *item.record]))


def _put_pack(txn: Any, first: int, pack: int, group: list[StoredItem]) -> None:
    content = b"".join([piece for item in group for piece in item.record])
    txn.put(_PACK_KEY.pack(b"p", pack), content)
    start = 0
    for number, item in enumerate(group, first):
        stop = start + item.size_bytes
        checksum = checksum_of(item.key, content[start:stop])
        entry = _ENTRY.pack(number, checksum, pack) + _SPAN.pack(start, item.size_bytes)
        txn.put(item.key, entry)
        start = stop
