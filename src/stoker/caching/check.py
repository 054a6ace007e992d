"""Reads through a store's tables, in a process of its own: damage may crash who reads."""

from __future__ import annotations

import os
import struct
import sys

import lmdb

from stoker.caching.store import DATA, PAGE_BYTES

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
        env = lmdb.open(
            folder, map_size=limit_bytes, readonly=True, lock=False, max_dbs=2, readahead=False
        )
        packs, index = (
            env.open_db(b"packs", integerkey=True, create=False),
            env.open_db(b"index", create=False),
        )
        with env.begin(buffers=True) as txn:
            sizes = []
            for number, (key, content) in enumerate(txn.cursor(db=packs)):
                if int.from_bytes(key, sys.byteorder) != number or len(content) > limit_bytes:
                    return "its packs are in disorder"
                sizes.append(len(content))
            last = b""
            for key, entry in txn.cursor(db=index):
                if len(key) != 16 or len(entry) < 24 or bytes(key) <= last:
                    return "its index is in disorder"
                last = bytes(key)
                _, _, pack = struct.unpack_from("<QQq", entry)
                if pack == -1:
                    continue
                start, length = struct.unpack_from("<QQ", entry, 24)
                if not 0 <= pack < len(sizes) or start + length > sizes[pack]:
                    return f"item {last.hex()} lies outside of its pack"
            if len(sizes) != txn.stat(packs)["entries"]:
                return "packs are missing"
    except lmdb.Error as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])) or 0)
