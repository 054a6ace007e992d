"""What tests of stores share with the scripts that they run: items that are functions of a number.

A store takes bytes: item ``n`` has a key, a size and a content that follow from ``n`` alone, so
that any process can tell whether what it finds is what somebody wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import stoker
from stoker.cache import store_dir
from stoker.cache.counters import ITEMS
from stoker.cache.layout import StoredItem
from stoker.cache.store import DATA, Missing, Store, StoreLocked

HERE = os.path.dirname(os.path.abspath(__file__))
PRELUDE = f"""
sys.path.insert(0, {HERE!r})
from stores import *
"""
"""What a script begins with that wants these."""

LIMIT = 1 << 20
USER = (1, 2)


def key(n: int) -> bytes:
    return hashlib.md5(str(n).encode(), usedforsecurity=False).digest()


def content(n: int, size: int | None = None) -> bytes:
    size = 300 + n * 7919 % 9000 if size is None else size
    word = hashlib.md5(key(n), usedforsecurity=False).digest()
    return (word * (size // len(word) + 1))[:size]


def item(n: int, size: int | None = None) -> StoredItem:
    record = content(n, size)
    return StoredItem(key(n), [record[:7], record[7:]], len(record), USER)


def joined(folder: str, limit: int = LIMIT, **options: Any) -> store_dir.StoreDir:
    arguments = {"temporary": False, "describes": "a test", **options}
    made = store_dir.join(folder, limit_bytes=limit, **arguments)
    assert made is not None
    return made


@contextlib.contextmanager
def opened(folder: str, limit: int = LIMIT, **options: Any) -> Iterator[Store]:
    """Join a store and open it; then close and leave it."""
    hold = joined(folder, limit, **options)
    try:
        store = Store(folder, hold.about.limit_bytes)
        try:
            yield store
        finally:
            store.close()
    finally:
        hold.leave()


def counted(pipeline: stoker.Pipeline[Any]) -> stoker.types.CacheStats:
    """Return what a pipeline's cache has counted."""
    found = pipeline.stats().cache
    assert found is not None
    return found


def fill(disk: str) -> None:
    """Write a file until there is no room left beside it."""
    with open(os.path.join(disk, "filler"), "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass


def unharmed(what: str) -> None:
    raise AssertionError(f"damaged: {what}")


def found(store: Store, numbers: Sequence[int], damaged: Any = unharmed) -> dict[int, bytes]:
    """Return what is there of some items."""
    got = store.get_many([key(n) for n in numbers], bytes, damaged)
    return {
        n: value for n, value in zip(numbers, got, strict=True) if not isinstance(value, Missing)
    }


def keys_in(store: Store) -> list[bytes]:
    with store._environment().begin() as txn:
        return [each for each in txn.cursor().iternext(values=False) if len(each) == 16]


def wrong(items: dict[int, bytes]) -> list[int]:
    """Return those that are not what they should be."""
    return [n for n, value in items.items() if value != content(n)]


def patiently(store: Store, items: Iterable[StoredItem]) -> None:
    """Add items, however long others write."""
    items = list(items)
    give_up_at = time.monotonic() + 200
    while True:
        try:
            store.add(items)
            return
        except StoreLocked:
            assert time.monotonic() < give_up_at, "somebody writes for ever"
            time.sleep(0.001)


def whole(folder: str, limit: int, most: int) -> dict[str, Any]:
    """Open a store that others may write to, look at everything in it, and tell."""
    with opened(folder, limit) as store:
        patiently(store, [])  # while others write, it may be that nothing can be looked up yet
        known = set(keys_in(store))
        there = found(store, range(most))
        data = os.stat(os.path.join(folder, DATA))
        return {
            "items": len(there),
            "wrong": wrong(there),
            "strangers": len(known - {key(n) for n in there}),
            "counted": int(store.counters.head[ITEMS]),
            "bytes": data.st_size,
            "in budget": data.st_size == limit and data.st_blocks * 512 <= limit,
        }


def forked(work: Any) -> int:
    """Run something in a child, which ends with 0 if it raised nothing; return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pids: Iterable[int]) -> list[int]:
    """Wait for children; return their codes, negative for signals."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
