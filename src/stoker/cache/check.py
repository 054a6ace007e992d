"""Reads through a store's tables, in a process of its own: damage may crash who reads."""

from __future__ import annotations

import os
import struct
import sys

import lmdb

from stoker.cache.store import COUNTS_KEY, DATA, KEY_BYTES, PAGE_BYTES

BEGINS = "the check begins"
"""Printed first: what comes behind it is about the store."""
_META = struct.Struct("<IIQQ")  # of LMDB's first two pages: magic, version, address, map size
_MAGIC = 0xBEEFC0DE


def main(folder: str, limit_bytes: int) -> str:
    """Return what is wrong with a store; "" for nothing."""
    with open(os.path.join(folder, DATA), "rb") as file:
        for page in range(2):
            file.seek(page * PAGE_BYTES + 16)
            if _META.unpack(file.read(_META.size))[0] != _MAGIC:
                return "it does not begin as a store does"
    try:
        env = lmdb.open(folder, map_size=limit_bytes, readonly=True, lock=False, readahead=False)
        with env.begin(buffers=True) as txn:
            sizes: dict[int, int] = {}
            items = struct.unpack("<QQQ", txn.get(COUNTS_KEY) or bytes(24))[0]
            numbers = bytearray(min(items, txn.stat()["entries"]))
            last, count = b"", 0
            for key, content in txn.cursor():
                name = bytes(key)
                if name <= last or len(content) > limit_bytes:
                    return "its items are in disorder"
                last = name
                count += 1
                if len(name) == 9:
                    sizes[int.from_bytes(name[1:], "big")] = len(content)
            for key, entry in txn.cursor():
                if len(key) != KEY_BYTES:
                    continue
                number, _, pack = struct.unpack_from("<QQq", entry)
                if number >= len(numbers) or numbers[number]:
                    return f"item {bytes(key).hex()} has a number that cannot be"
                numbers[number] = 1
                if pack == -1:
                    continue
                start, length = struct.unpack_from("<QQ", entry, 24)
                if start + length > sizes.get(pack, -1):
                    return f"item {bytes(key).hex()} lies outside of its pack"
            if count != txn.stat()["entries"] or not all(numbers) or len(numbers) != items:
                return "items are missing"
    except struct.error:
        return "an item is cut short"
    except lmdb.Error as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(BEGINS, flush=True)
    sys.exit(main(sys.argv[1], int(sys.argv[2])) or 0)
