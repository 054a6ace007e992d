"""The store: items in LMDB, shared by all processes of a host, safe if any of them is killed.

LMDB's requirements, found by trial: no ``writemap`` (a full tmpfs kills the process), no ``sync``
(after a crash of the machine the store is discarded as a whole), the file as long as the map from
the beginning (or a shortened file kills its readers), and no environment across a fork. The file is
sparse. The size of the map is the budget: LMDB itself refuses items beyond it.

Reading goes through ``ForkGate``, which a fork shuts. Environments are closed before the fork and
opened again where they are needed; in the child everything inherited is dropped. One thread of each
process writes (``writer``). A writer's lock that is taken is tried again later. Readers never wait
for a writer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NamedTuple, TypeVar

from stoker.basics import resources
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
from stoker.cache.layout import (
    PACK_BYTES,
    PAGE_BYTES,
    StoredItem,
    checksum_of,
    find_entry,
    list_keys,
    put_items,
)
from stoker.errors import CacheError

T = TypeVar("T")

DATA = "data.mdb"
LOCK = "lock.mdb"
COUNTERS = "counters"
ADMISSION = "admission"
FILES = frozenset({DATA, LOCK, COUNTERS, ADMISSION})
_NO_DESCRIPTORS = frozenset({os.strerror(errno.EMFILE), os.strerror(errno.ENFILE)})
# See ``_split``. Items of 110 KB took LMDB 33 to 36 us each, once it touched new memory 298 us.
_COMMIT_BYTES = 1 << 20
# Threads that read at a time, of all processes: one more would get LMDB's ReadersFullError. 256 KB.
_READERS = 4096
# Of each reader in LMDB's lock file: a cache line of its own.
_READER_BYTES = 64


class Missing:
    """Stands for an item that is not in the store."""


MISSING = Missing()


class Added(NamedTuple):
    """The items that entered, their bytes, and the items that did not fit or were there already."""

    items: int
    size_bytes: int
    refused: list[StoredItem]


class Busy(Exception):
    """Another process is writing."""


class ForkGate:
    """Admits any number of threads, or excludes all of them while the process forks.

    Every thread has its own door, a plain lock. A count of the threads inside would go wrong:
    Ctrl-C may come between any two steps of Python code, but a lock is taken or given back in one
    step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doors: dict[int, threading.Lock] = {}

    def door(self) -> threading.Lock:
        """Return this thread's door; the thread is inside while it holds this lock."""
        me = threading.get_ident()
        door = self._doors.get(me)
        if door is None:
            with self._lock:
                door = self._doors[me] = threading.Lock()
        return door

    def shut(self) -> None:
        """Exclude all threads; first wait until the threads inside have left."""
        self._lock.acquire()
        for door in self._doors.values():
            door.acquire()

    def open(self) -> None:
        for door in self._doors.values():
            door.release()
        self._lock.release()


class Store:
    """An open store. One object a process: LMDB allows no two.

    Any thread may use it. While the process forks, readers and writers wait.

    Args:
        folder: the store's folder, made by ``create``.
        limit_bytes: the budget with which it was made.
        in_memory: whether it is in memory; threads then read in turns, which is faster than
            competing for the interpreter. From a disk they read together.

    Raises ImportError without LMDB.
    """

    def __init__(self, folder: str, limit_bytes: int, *, in_memory: bool = False) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._lmdb = import_lmdb()
        self._gate = ForkGate()
        self._turn: AbstractContextManager[Any] = threading.Lock() if in_memory else nullcontext()
        self._lock = threading.Lock()
        self._env: Any = None
        self._verified = bytearray()  # by number: whether this process has checked it
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._admission = os.open(os.path.join(folder, ADMISSION), flags, 0o600)
        self.counters = Counters(os.path.join(folder, COUNTERS))

    @staticmethod
    def create(folder: str, limit_bytes: int) -> None:
        """Make the files of a store with this limit in bytes.

        Raises OSError where there is no room even for an empty store, ImportError without LMDB.
        """
        lmdb = import_lmdb()
        # LMDB would make a file with holes.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with open(os.open(os.path.join(folder, LOCK), flags, 0o600), "wb") as lock:
            allocate(lock.fileno(), _READER_BYTES * (_READERS + 8))
        try:
            _open_environment(folder, limit_bytes).close()
        except lmdb.Error as error:
            raise OSError(f"{folder}: {error}") from error
        os.truncate(os.path.join(folder, DATA), limit_bytes)
        with closing(Counters(os.path.join(folder, COUNTERS))) as counters:
            counters.head[DATA_NS] = changed_ns(folder)

    @property
    def is_full(self) -> bool:
        """Whether the store takes no more items."""
        head = self.counters.head
        return bool(head[FULL] or head[ENDED])

    def get_many(
        self,
        keys: Sequence[bytes],
        read: Callable[[memoryview], T],
        on_damage: Callable[[str], None],
    ) -> list[T | Missing]:
        """Return ``read(item)`` for each item, or ``MISSING``.

        ``read`` gets the store's own memory, which it must not keep; ``on_damage`` is called for
        each damaged item, which counts as missing.
        """
        found: list[T | Missing] = []
        with self._gate.door(), self._turn:
            env: Any = None
            try:
                env = self._environment()
                with env.begin(buffers=True) as txn:
                    verified = self._verified
                    for key in keys:
                        entry = find_entry(txn, key)
                        if entry is None:
                            found.append(MISSING)
                            continue
                        number, checksum, record = entry
                        known = number < len(verified) and verified[number]
                        if record is None or not (
                            known or self._verifies(number, checksum, key, record)
                        ):
                            on_damage(f"item {key.hex()}")
                            found.append(MISSING)
                            continue
                        found.append(read(record))
            except self._lmdb.ReadersFullError:
                env.reader_check()  # those of processes that were killed
            except (self._lmdb.Error, struct.error) as error:
                what = self._describe(error)
                if what in _NO_DESCRIPTORS:  # it is whole
                    raise CacheError(
                        f"the cache cannot be opened: {resources.no_descriptors()}"
                    ) from error
                on_damage(what)
        return found + [MISSING] * (len(keys) - len(found))

    def records(self, keys: Sequence[bytes]) -> list[tuple[int, bytes | memoryview] | None]:
        """Return checksums and stored records, unverified: the caller verifies them.

        Large records are the store's own memory, which does not change while the store is open: no
        item is deleted, and items with their own pages are never moved. Small ones are copies,
        since they share pages that are rewritten. None for each missing item.
        """
        found: list[tuple[int, bytes | memoryview] | None] = []
        with self._gate.door(), self._turn:
            env: Any = None
            try:
                env = self._environment()
                with env.begin(buffers=True) as txn:
                    for key in keys:
                        entry = find_entry(txn, key)
                        record = None if entry is None else entry[2]
                        if entry is None or record is None:
                            found.append(None)
                        else:
                            own = len(record) >= PACK_BYTES
                            found.append((entry[1], record if own else bytes(record)))
            except self._lmdb.ReadersFullError:
                env.reader_check()
            except (self._lmdb.Error, struct.error):
                pass  # whoever reads here as well reports it
        return found + [None] * (len(keys) - len(found))

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        with self._gate.door():
            try:
                env = self._environment()
                with env.begin(buffers=True) as txn:
                    return [txn.get(key) is not None for key in keys]
            except self._lmdb.ReadersFullError:
                env.reader_check()
            except self._lmdb.Error:
                pass  # reading them reports it
        return [False] * len(keys)

    def keys(self) -> list[bytes]:
        with self._gate.door(), self._environment().begin() as txn:
            return list_keys(txn)

    def _verifies(self, number: int, checksum: int, key: bytes, record: memoryview) -> bool:
        """Verify an item that this process reads for the first time."""
        if checksum_of(key, record) != checksum:
            return False
        verified = self._verified
        if number >= len(verified):
            with self._lock:
                # A page of marks at least, so that items that come one by one do not each extend
                # it.
                verified.extend(bytes(max(4096, number + 1 - len(verified))))
        verified[number] = 1
        return True

    def add(self, items: Sequence[StoredItem]) -> Added:
        """Add items, as many as the budget allows. Existing items stay.

        Raises:
            Busy: another process is writing now.
            OSError: no item can be written any more; the existing ones stay.
        """
        with self._gate.door():
            try:
                fcntl.flock(self._admission, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy from None
            try:
                return self._add_locked(items)
            except (self._lmdb.Error, struct.error) as error:
                self.counters.head[ENDED] = 1
                raise OSError(self._describe(error)) from error
            finally:
                fcntl.flock(self._admission, fcntl.LOCK_UN)

    def _add_locked(self, items: Sequence[StoredItem]) -> Added:
        env = self._environment()
        env.reader_check()  # readers that were killed keep pages from being used again
        entered: dict[bytes, StoredItem] = {}
        for batch in _split(items):
            entered |= self._add_batch(env, batch)
        head = self.counters.head
        head[USED_BYTES] = (env.info()["last_pgno"] + 1) * PAGE_BYTES
        head[DATA_NS] = changed_ns(self.folder)  # another time tells that others have written
        size = sum(item.size_bytes for item in entered.values())
        refused = [item for item in items if entered.get(item.key) is not item]
        return Added(len(entered), size, refused)

    def _add_batch(self, env: Any, items: list[StoredItem]) -> dict[bytes, StoredItem]:
        """Add items, in one transaction if they all fit; return the added ones, by key."""
        head = self.counters.head
        if head[FULL]:
            return {}
        try:
            return self._commit(env, items)
        except self._lmdb.MapFullError:
            if len(items) > 1:  # as many as fit, one by one
                each = [self._add_batch(env, [item]) for item in items]
                return {key: item for entered in each for key, item in entered.items()}
        # Something large may be left over while there is room for others.
        mean = head[PAYLOAD_BYTES] / head[ITEMS] if head[ITEMS] else 0
        free = self.limit_bytes - int(env.info()["last_pgno"] + 1) * PAGE_BYTES
        if items[0].size_bytes <= 2 * mean or free < PACK_BYTES:
            head[FULL] = 1
        return {}

    def _commit(self, env: Any, items: list[StoredItem]) -> dict[bytes, StoredItem]:
        """Write the new ones of some items in one transaction; return them."""
        with env.begin(write=True) as txn:
            new = {item.key: item for item in items if txn.get(item.key) is None}
            if not new:
                return new
            items_now, payload_bytes = put_items(txn, new.values())
        head = self.counters.head
        head[ITEMS], head[PAYLOAD_BYTES] = items_now, payload_bytes
        return new

    def close(self) -> None:
        """Close all files; the object cannot be used afterwards."""
        self.before_fork()
        self.drop()

    def _environment(self) -> Any:
        """Return the environment, opened on first use. Called within the gate."""
        if self._env is None:
            with self._lock:
                if self._env is None:
                    self._env = _open_environment(self.folder, self.limit_bytes)
        return self._env

    def _describe(self, error: Exception) -> str:
        """Return LMDB's message without its path."""
        return str(error).removeprefix(f"{self.folder}: ")

    def before_fork(self) -> None:
        """Close the environment, and keep it closed."""
        self._gate.shut()
        if self._env is not None:
            self._env.close()
            self._env = None

    def after_fork(self) -> None:
        self._gate.open()

    def drop(self) -> None:
        """Close the other files; in a child, without use."""
        self.counters.close()
        os.close(self._admission)


def import_lmdb() -> Any:
    """Return the ``lmdb`` module, imported when a store is first opened.

    Raises ImportError with what to install.
    """
    try:
        import lmdb
    except ImportError as error:
        raise ImportError(f"a cache needs lmdb ({error}): pip install lmdb") from error
    return lmdb


def changed_ns(folder: str) -> int:
    """Return the time of the last write to the items by any process: no tool can reset it."""
    return os.stat(os.path.join(folder, DATA)).st_ctime_ns


def _open_environment(folder: str, limit_bytes: int) -> Any:
    return import_lmdb().open(
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


def _split(items: Sequence[StoredItem]) -> Iterator[list[StoredItem]]:
    """Split items into transactions.

    In large ones LMDB touches new memory; in small ones a thread yields the interpreter too often.
    """
    batch: list[StoredItem] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.size_bytes
        if size >= _COMMIT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
