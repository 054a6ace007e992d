"""The store: items in LMDB, which all processes of a host share and none of them can spoil.

One table, three kinds of keys. 16 bytes: an item, its number, its checksum and what it holds, or
where that is; ``p`` and a number: a pack, which small items share, since LMDB gives whole pages to
what is more than half a page; ``c``: how many items and packs there are, and the items' bytes.
Nothing is ever deleted, and nothing but the last is replaced. (Tables with names would be opened in
a transaction that waits for who writes.)

What LMDB asks for, by trial: no ``writemap`` (a full tmpfs kills the process), no ``sync`` (what a
crash of the machine leaves is thrown away as a whole), the file as long as the map from the
beginning (or a file that was cut kills its readers), and no environment across a fork.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import lmdb
import xxhash

from stoker.cache.counters import (
    DATA_NS,
    ENDED,
    FULL,
    ITEMS,
    PAYLOAD_BYTES,
    USED_BYTES,
    Counters,
    allocate,
)
from stoker.cache.gate import Gate

T = TypeVar("T")

KEY_BYTES = 16
PACK_BYTES = 1 << 16
"""Items of less share a content of about so many bytes."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
DATA = "data.mdb"
LOCK = "lock.mdb"
COUNTERS = "counters"
ADMISSION = "admission"
FILES = frozenset({DATA, LOCK, COUNTERS, ADMISSION})
_COMMIT_BYTES = 1 << 20
_READERS = 4096
_READER_BYTES = 64
_HEADER_BYTES = 16  # of LMDB, in front of what takes whole pages
_ENTRY = struct.Struct("<QQq")  # number, checksum, pack; what is large follows
_ALONE = -1  # in place of a pack
_PLACE = struct.Struct("<QQ")  # start and length within a pack
_PACK = struct.Struct(">cQ")
_COUNTS = struct.Struct("<QQQ")  # items, packs, bytes
COUNTS_KEY = b"c"


class Missing:
    """What stands for an item that is not in the store."""


MISSING = Missing()


class StoredItem(NamedTuple):
    """An item that may enter a store."""

    key: bytes
    """16 bytes that tell it from all others."""
    record: list[bytes]
    """What is kept, in pieces."""
    size_bytes: int
    """Of all pieces."""
    user: tuple[int, int]
    """On whose account it is offered."""
    file: str | None = None
    """A local file that need not be in the page cache as well, once this is in the store."""


class Added(NamedTuple):
    """What became of items."""

    items: int
    """How many entered."""
    size_bytes: int
    """Their bytes."""
    refused: list[StoredItem]
    """Those that did not fit, or were there already."""


class Busy(Exception):
    """Another process is writing."""


class Store:
    """An open store. One object in a process: LMDB allows no two.

    Any thread may use it. While the process forks, readers and writers wait.

    Args:
        folder: where it is; whoever makes it must have called ``create``.
        limit_bytes: its budget, as it was made with.
        in_memory: whether it is; threads then read in turns, which is faster than to compete for
            the interpreter. From a disk they read together.
    """

    def __init__(self, folder: str, limit_bytes: int, *, in_memory: bool = False) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._gate = Gate()
        self._turn: AbstractContextManager[Any] = threading.Lock() if in_memory else nullcontext()
        self._lock = threading.Lock()
        self._env: Any = None
        self._verified = bytearray()  # by number: whether this process has checked it
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._admission = os.open(os.path.join(folder, ADMISSION), flags, 0o600)
        self.counters = Counters(os.path.join(folder, COUNTERS))

    @staticmethod
    def create(folder: str, limit_bytes: int) -> None:
        """Make the files of a store that may take so many bytes.

        Raises OSError where there is no room even for an empty one.
        """
        # LMDB would make a file with holes.
        with open(os.path.join(folder, LOCK), "wb", opener=_private) as lock:
            allocate(lock.fileno(), _READER_BYTES * (_READERS + 8))
        try:
            env = _opened(folder, limit_bytes)
            env.close()
        except lmdb.Error as error:
            raise OSError(f"{folder}: {error}") from error
        os.truncate(os.path.join(folder, DATA), limit_bytes)
        counters = Counters(os.path.join(folder, COUNTERS))
        counters.head[DATA_NS] = changed_ns(folder)
        counters.close()

    @property
    def full(self) -> bool:
        """Whether nothing enters any more."""
        head = self.counters.head
        return bool(head[FULL] or head[ENDED])

    def get_many(
        self,
        keys: Sequence[bytes],
        read: Callable[[memoryview], T],
        damaged: Callable[[str], None],
    ) -> list[T | Missing]:
        """Return what ``read`` makes of each item, or ``MISSING``.

        Args:
            keys: of the items.
            read: is handed the store's own memory, which it may not keep.
            damaged: called with what is found not to be as it was written; it is missing.
        """
        return list(self.each(keys, read, damaged))

    def each(
        self,
        keys: Sequence[bytes],
        read: Callable[[memoryview], T],
        damaged: Callable[[str], None],
    ) -> Iterator[T | Missing]:
        """Yield the same, one by one; until the end this thread asks for no other, nor forks."""
        done = 0
        with self._gate.door(), self._turn:
            env: Any = None
            try:
                env = self._environment()
                with env.begin(buffers=True) as txn:
                    for key in keys:
                        record = self._record(txn, key, damaged)
                        done += 1
                        yield MISSING if record is None else read(record)
            except lmdb.ReadersFullError:
                env.reader_check()  # those of processes that were killed
            except (lmdb.Error, struct.error) as error:
                damaged(self._said(error))
        yield from [MISSING] * (len(keys) - done)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell which items are there."""
        with self._gate.door():
            try:
                env = self._environment()
                with env.begin(buffers=True) as txn:
                    return [txn.get(key) is not None for key in keys]
            except lmdb.ReadersFullError:
                env.reader_check()
            except lmdb.Error:
                pass  # who asks for them will learn of it
        return [False] * len(keys)

    def keys(self) -> list[bytes]:
        """Return the keys of all items."""
        with self._gate.door(), self._environment().begin() as txn:
            keys = txn.cursor().iternext(values=False)
            return [bytes(key) for key in keys if len(key) == KEY_BYTES]

    def _record(self, txn: Any, key: bytes, damaged: Callable[[str], None]) -> memoryview | None:
        entry: memoryview | None = txn.get(key)
        if entry is None:
            return None
        number, checksum, pack = _ENTRY.unpack_from(entry)
        record: memoryview | None
        if pack == _ALONE:
            record = entry[_ENTRY.size :]
        else:
            start, length = _PLACE.unpack_from(entry, _ENTRY.size)
            content = txn.get(_PACK.pack(b"p", pack))
            record = None if content is None else content[start : start + length]
        verified = self._verified
        if number < len(verified) and verified[number]:
            return record
        if record is None or xxhash.xxh3_64_intdigest(record) != checksum:
            damaged(f"item {key.hex()}")
            return None
        if number >= len(verified):
            with self._lock:
                verified.extend(bytes(max(4096, number + 1 - len(verified))))
        verified[number] = 1
        return record

    def add(self, items: Sequence[StoredItem]) -> Added:
        """Let items in, as many as the budget allows. Those that are there already stay.

        Raises:
            Busy: another process is writing just now.
            OSError: nothing can be written any more; what is there stays.
        """
        with self._gate.door():
            try:
                fcntl.flock(self._admission, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy from None
            try:
                return self._added(items)
            except (lmdb.Error, struct.error) as error:
                self.counters.head[ENDED] = 1
                raise OSError(self._said(error)) from error
            finally:
                fcntl.flock(self._admission, fcntl.LOCK_UN)

    def _added(self, items: Sequence[StoredItem]) -> Added:
        head = self.counters.head
        env = self._environment()
        env.reader_check()  # who was killed while reading keeps pages from being used again
        added = Added(0, 0, [])
        for some in _batched(items):
            added = _together(added, self._some_added(env, some))
        head[USED_BYTES] = (env.info()["last_pgno"] + 1) * PAGE_BYTES
        head[DATA_NS] = changed_ns(self.folder)  # if it is another, somebody else was here
        return added

    def _some_added(self, env: Any, items: list[StoredItem]) -> Added:
        head = self.counters.head
        if head[FULL]:
            return Added(0, 0, items)
        try:
            entered = self._commit(env, items)
        except lmdb.MapFullError:
            if len(items) > 1:  # as many as fit, one by one
                added = Added(0, 0, [])
                for item in items:
                    added = _together(added, self._some_added(env, [item]))
                return added
            # Something large may be left over while there is room for others.
            mean = head[PAYLOAD_BYTES] / head[ITEMS] if head[ITEMS] else 0
            free = self.limit_bytes - int(env.info()["last_pgno"] + 1) * PAGE_BYTES
            if items[0].size_bytes <= 2 * mean or free < PACK_BYTES:
                head[FULL] = 1
            return Added(0, 0, items)
        size = sum(item.size_bytes for item in entered.values())
        there = [item for item in items if entered.get(item.key) is not item]
        return Added(len(entered), size, there)

    def _commit(self, env: Any, items: list[StoredItem]) -> dict[bytes, StoredItem]:
        """Write what is new of some items, in one transaction; return it."""
        with env.begin(write=True) as txn:
            new = {item.key: item for item in items if txn.get(item.key) is None}
            if not new:
                return new
            count, packs, payload = _COUNTS.unpack(txn.get(COUNTS_KEY) or bytes(_COUNTS.size))
            for group in _packed(new.values()):
                if len(group) == 1 and group[0].size_bytes >= PACK_BYTES:
                    _put_alone(txn, count, group[0])
                else:
                    _put_pack(txn, count, packs, group)
                    packs += 1
                count += len(group)
            payload += sum(item.size_bytes for item in new.values())
            txn.put(COUNTS_KEY, _COUNTS.pack(count, packs, payload))
        head = self.counters.head
        head[ITEMS], head[PAYLOAD_BYTES] = count, payload
        return new

    def close(self) -> None:
        """Let go of everything; nobody may use it any more."""
        self._gate.shut()
        self._close_environment()
        self.counters.close()
        os.close(self._admission)

    def _environment(self) -> Any:
        """Return the environment, opened by the first who needs it. Called within the gate."""
        if self._env is None:
            with self._lock:
                if self._env is None:
                    self._env = _opened(self.folder, self.limit_bytes)
        return self._env

    def _said(self, error: Exception) -> str:
        """Return what LMDB says, without the path that it says it of."""
        return str(error).removeprefix(f"{self.folder}: ")

    def _close_environment(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def before_fork(self) -> None:
        """Close the environment."""
        self._gate.shut()
        self._close_environment()

    def after_fork(self) -> None:
        """Go on."""
        self._gate.open()

    def drop(self) -> None:
        """In a child: close what was inherited, without use."""
        self.counters.close()
        os.close(self._admission)


def _opened(folder: str, limit_bytes: int) -> Any:
    return lmdb.open(
        folder,
        map_size=limit_bytes,
        mode=0o600,
        sync=False,
        metasync=False,
        writemap=False,
        readahead=False,
        max_readers=_READERS,
        max_spare_txns=8,
    )


def _put_alone(txn: Any, number: int, item: StoredItem) -> None:
    hashed = xxhash.xxh3_64()
    for piece in item.record:
        hashed.update(piece)
    entry = _ENTRY.pack(number, hashed.intdigest(), _ALONE)
    txn.put(item.key, b"".join([entry, *item.record]))


def _put_pack(txn: Any, items: int, packs: int, group: list[StoredItem]) -> None:
    content = b"".join([piece for item in group for piece in item.record])
    txn.put(_PACK.pack(b"p", packs), content)
    start = 0
    for number, item in enumerate(group, items):
        stop = start + item.size_bytes
        checksum = xxhash.xxh3_64_intdigest(content[start:stop])
        entry = _ENTRY.pack(number, checksum, packs) + _PLACE.pack(start, item.size_bytes)
        txn.put(item.key, entry)
        start = stop


def changed_ns(folder: str) -> int:
    """Return when the items were written to last, by anybody: no tool sets this time back."""
    return os.stat(os.path.join(folder, DATA)).st_ctime_ns


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _together(one: Added, other: Added) -> Added:
    refused = [*one.refused, *other.refused]
    return Added(one.items + other.items, one.size_bytes + other.size_bytes, refused)


def _batched(items: Sequence[StoredItem]) -> list[list[StoredItem]]:
    """Part items into transactions.

    In large ones LMDB touches memory for the first time; in small ones a thread gives the
    interpreter to others too often.
    """
    batches: list[list[StoredItem]] = []
    room = 0
    for item in items:
        if room <= 0:
            batches.append([])
            room = _COMMIT_BYTES
        batches[-1].append(item)
        room -= item.size_bytes
    return batches


def _packed(items: Iterable[StoredItem]) -> list[list[StoredItem]]:
    """Sort items into contents: small ones together, others alone."""
    packs: list[list[StoredItem]] = []
    small: list[StoredItem] = []
    room = PACK_BYTES - _HEADER_BYTES  # so that a pack fills its pages
    for item in items:
        if item.size_bytes >= PACK_BYTES:
            packs.append([item])
            continue
        if small and item.size_bytes > room:
            packs.append(small)
            small, room = [], PACK_BYTES - _HEADER_BYTES
        small.append(item)
        room -= item.size_bytes
    return packs + [small] * bool(small)
