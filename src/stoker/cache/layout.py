"""The layout of a store's LMDB table: its keys and values, and how they are checked.

The table has four kinds of keys. A key of 16 bytes is an item: its number, its checksum, and its
record or the record's place in a block. ``p`` and a number is a block of several small records:
LMDB gives whole pages to values of more than half a page. ``c`` holds the totals, ``t`` and a
chain's digest those of its items. No entry is ever deleted, and only the totals are replaced.
(Named tables are not used: opening one takes a transaction that waits for writers.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import xxhash

# 128 bits: among 10^9 examples, two share a key with a probability of 10^-21.
KEY_BYTES = 16
BLOCK_BYTES = 1 << 16
"""Smaller items share a block of about this size. LMDB rounds values up to whole pages: items of
1,900 bytes took 2.17 times their size when each was a value of its own."""
# LMDB uses the system's page size, usually 4 KiB.
PAGE_BYTES = mmap.PAGESIZE
# LMDB's header in front of a value that takes whole pages.
PAGE_HEADER_BYTES = 16
_ENTRY = struct.Struct("<QQq")  # number, checksum, block; a record or a span follows
# In place of a block's number: the record follows in the entry itself.
_NO_BLOCK = -1
_SPAN = struct.Struct("<QQ")  # start and length of a record within its block
_BLOCK_KEY = struct.Struct(">cQ")
# A key, an entry with a span, and LMDB's own bytes around them, in leaves that random keys fill to
# two thirds.
_AROUND_BYTES = (KEY_BYTES + _ENTRY.size + _SPAN.size + 10) * 3 // 2
_TOTALS = struct.Struct("<QQQ")  # items, blocks, bytes of all items
_TOTALS_KEY = b"c"
_CHAIN_TOTALS = struct.Struct("<QQ")  # items, bytes of these


class StoredItem(NamedTuple):
    """An item that may enter a store."""

    key: bytes
    """16 bytes that identify it."""
    record: list[bytes]
    """The stored bytes, in pieces."""
    size_bytes: int
    """The total size of the pieces."""
    user: tuple[int, int]
    """The user that offers it."""
    chain: bytes = b""
    """The digest of the chain whose totals count it; b"" for none."""


def room_of(size_bytes: int) -> int:
    """Return about how many bytes an item takes in a store, with its entry.

    Whole pages if it is large; otherwise its part of a block, of which a page is not full.
    """
    if size_bytes >= BLOCK_BYTES:
        content = size_bytes + _ENTRY.size + PAGE_HEADER_BYTES
        return -(-content // PAGE_BYTES) * PAGE_BYTES + _AROUND_BYTES
    return int(size_bytes * (1 + PAGE_BYTES / BLOCK_BYTES)) + _AROUND_BYTES


def checksum_of(key: bytes, *record: bytes | memoryview) -> int:
    """Return the checksum of an item. It covers the key, so no other item's record matches it."""
    digest = xxhash.xxh3_64(key)
    for piece in record:
        digest.update(piece)
    return digest.intdigest()


def find_entry(
    txn: Any, key: bytes
) -> tuple[int, int, memoryview | None, tuple[int, int] | None] | None:
    """Return an item's number, checksum, record and place; None if the item is missing.

    The record is a view of LMDB's memory; it is None if the table is damaged. The place is a number
    of the pages that hold it, and the record's start within these; None if it shares a page with
    keys, which LMDB rewrites. Pages of values alone stay where they are in the file.
    """
    entry: memoryview | None = txn.get(key)
    if entry is None:
        return None
    number, checksum, block = _ENTRY.unpack_from(entry)
    if block == _NO_BLOCK:
        place = (~number, _ENTRY.size) if len(entry) >= PAGE_BYTES else None
        return number, checksum, entry[_ENTRY.size :], place
    start, length = _SPAN.unpack_from(entry, _ENTRY.size)
    content = txn.get(_BLOCK_KEY.pack(b"p", block))
    if content is None:
        return number, checksum, None, None
    place = (block, start) if len(content) >= PAGE_BYTES else None
    return number, checksum, content[start : start + length], place


def put_items(txn: Any, items: Iterable[StoredItem]) -> tuple[int, int]:
    """Write items with new keys; return the number of all items in the table, and their bytes."""
    count, blocks, payload_bytes = _read_totals(txn)
    items = list(items)
    for chain in {item.chain for item in items} - {b""}:
        own_count, own_bytes = chain_totals(txn, chain)
        sizes = [item.size_bytes for item in items if item.chain == chain]
        txn.put(b"t" + chain, _CHAIN_TOTALS.pack(own_count + len(sizes), own_bytes + sum(sizes)))
    for group in _group(items):
        if len(group) == 1 and group[0].size_bytes >= BLOCK_BYTES:
            _put_alone(txn, count, group[0])
        else:
            _put_block(txn, count, blocks, group)
            blocks += 1
        count += len(group)
        payload_bytes += sum(item.size_bytes for item in group)
    txn.put(_TOTALS_KEY, _TOTALS.pack(count, blocks, payload_bytes))
    return count, payload_bytes


def chain_totals(txn: Any, chain: bytes) -> tuple[int, int]:
    """Return the number of a chain's items, and their bytes."""
    return _CHAIN_TOTALS.unpack(txn.get(b"t" + chain) or bytes(_CHAIN_TOTALS.size))


def _read_totals(txn: Any) -> tuple[int, int, int]:
    return _TOTALS.unpack(txn.get(_TOTALS_KEY) or bytes(_TOTALS.size))


def _group(items: Iterable[StoredItem]) -> list[list[StoredItem]]:
    """Group small items into blocks that fill their pages; each large item is a group alone."""
    blocks: list[list[StoredItem]] = []
    small: list[StoredItem] = []
    room = BLOCK_BYTES - PAGE_HEADER_BYTES
    for item in items:
        if item.size_bytes >= BLOCK_BYTES:
            blocks.append([item])
            continue
        if small and item.size_bytes > room:
            blocks.append(small)
            small, room = [], BLOCK_BYTES - PAGE_HEADER_BYTES
        small.append(item)
        room -= item.size_bytes
    return blocks + [small] * bool(small)


def _put_alone(txn: Any, number: int, item: StoredItem) -> None:
    entry = _ENTRY.pack(number, checksum_of(item.key, *item.record), _NO_BLOCK)
    txn.put(item.key, b"".join([entry, *item.record]))


def _put_block(txn: Any, first: int, block: int, group: list[StoredItem]) -> None:
    content = b"".join([piece for item in group for piece in item.record])
    txn.put(_BLOCK_KEY.pack(b"p", block), content)
    start = 0
    for number, item in enumerate(group, first):
        stop = start + item.size_bytes
        checksum = checksum_of(item.key, content[start:stop])
        entry = _ENTRY.pack(number, checksum, block) + _SPAN.pack(start, item.size_bytes)
        txn.put(item.key, entry)
        start = stop
