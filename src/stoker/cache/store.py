"""The store: items in LMDB, shared by all processes of a host. Any of them may be killed.

How LMDB is used, and why (found by trial):

- No ``writemap``: on a full tmpfs it kills the process.
- No ``sync``: after a crash of the machine the whole store is discarded anyway.
- The file is as long as the map from the beginning, and sparse: a file that shrinks kills readers.
- The size of the map is the budget: LMDB itself refuses items beyond it.
- Items that were verified are read, or lent, from a map of our own, which stays where it is while
  the environment is closed and opened again; the file never shrinks, and pages of values alone are
  never moved.
- On a disk, our map reads only what is asked for, each record as a whole (``ask_for``). Left alone,
  the kernel reads 128 KB around each page: with little memory, 12 GB for 200 MB of small items.
- No environment lives across a fork: environments are closed before it and opened again on use, and
  the child drops everything that it inherits. Readers go through ``ForkGate``, which a fork shuts.

One thread of each process writes (``writer``). If another process has the write lock, it tries
again later. Readers never wait for a writer.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any, TypeVar

import numpy as np

from stoker.basics import resources
from stoker.cache.counters import (
    DAMAGED,
    DATA_NS,
    ENDED,
    FULL,
    IN_USE,
    ITEMS,
    PAYLOAD_BYTES,
    USED_BYTES,
    WRITING,
    Counters,
)
from stoker.cache.layout import (
    BLOCK_BYTES,
    PAGE_BYTES,
    StoredItem,
    chain_totals,
    checksum_of,
    find_entry,
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
# The size of a transaction, see ``_split_into_commits``. Items of 110 KB took LMDB 33 to 36 us each
# in transactions of this size, and 298 us in larger ones, where it touched new memory.
_COMMIT_BYTES = 1 << 20
# Threads of all processes that may read at once; one more gets LMDB's ReadersFullError. The table
# takes 256 KB.
_MAX_READERS = 4096
# The size of a reader's slot in LMDB's lock file: one cache line.
_READER_BYTES = 64


class Missing:
    """The type of ``MISSING``, which stands for an item that is not in the store."""


MISSING = Missing()


class StoreLocked(Exception):
    """Another process is writing."""


class ForkGate:
    """Admits any number of threads, or excludes all of them while the process forks.

    Each thread has a lock of its own, its door. A counter of the threads inside would go wrong,
    since Ctrl-C may come between any two steps of Python code; a lock is taken or released in one
    step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doors: dict[int, threading.Lock] = {}

    def door(self) -> threading.Lock:
        """Return this thread's lock; the thread is inside while it holds the lock."""
        thread_id = threading.get_ident()
        door = self._doors.get(thread_id)
        if door is None:
            with self._lock:
                door = self._doors[thread_id] = threading.Lock()
        return door

    def shut(self) -> None:
        """Wait until all threads inside have left, and exclude all threads."""
        self._lock.acquire()
        for door in self._doors.values():
            door.acquire()

    def open(self) -> None:
        for door in self._doors.values():
            door.release()
        self._lock.release()


class Store:
    """An open store. A process must not have two objects for one folder: LMDB does not allow it.

    Any thread may use it. While the process forks, readers and writers wait.

    Args:
        folder: the store's folder, made by ``create``.
        limit_bytes: the budget with which the store was made.
        in_memory: whether the store is in memory. Threads then read one after another, which is
            faster than competing for the GIL. From a disk they read at the same time.

    Attributes:
        map: the file of items. It stays valid, and must not be written to.

    Raises ImportError if LMDB is not installed.
    """

    def __init__(self, folder: str, limit_bytes: int, *, in_memory: bool = False) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._lmdb = import_lmdb()
        self._gate = ForkGate()
        self._is_on_disk = not in_memory
        self._read_lock: Any = threading.Lock() if in_memory else nullcontext()
        self._lock, self._add_lock = threading.Lock(), threading.Lock()
        self._env: Any = None
        self._starts: dict[int, int] = {}  # in the file, by the numbers of pages of values
        # An environment, and where in memory it has mapped the beginning of the file.
        self._base: tuple[Any, int | None] = None, None
        self._verified = bytearray()  # by item number: whether this process has verified the item
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._admission = os.open(os.path.join(folder, ADMISSION), flags, 0o600)
        self.counters = Counters(os.path.join(folder, COUNTERS))
        with open(os.path.join(folder, DATA), "rb") as file:  # now: a user may remove the folder
            self._inode = os.fstat(file.fileno()).st_ino
            self._mapped: Any = mmap.mmap(file.fileno(), limit_bytes, access=mmap.ACCESS_READ)
        if self._is_on_disk:
            self._mapped.madvise(mmap.MADV_RANDOM)
        self.map = memoryview(self._mapped)

    @staticmethod
    def create(folder: str, limit_bytes: int) -> None:
        """Make the files of a store with this limit in bytes.

        Raises OSError if there is no room even for an empty store, ImportError if LMDB is not
        installed.
        """
        lmdb = import_lmdb()
        # Allocated here: LMDB would make a sparse lock file, and a full disk would kill its users.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with open(os.open(os.path.join(folder, LOCK), flags, 0o600), "wb") as lock:
            os.posix_fallocate(lock.fileno(), 0, _READER_BYTES * (_MAX_READERS + 8))
        try:
            _open_environment(folder, limit_bytes).close()
        except lmdb.Error as error:
            raise OSError(f"{folder}: {error}") from error
        os.truncate(os.path.join(folder, DATA), limit_bytes)
        with closing(Counters(os.path.join(folder, COUNTERS))) as counters:
            counters.head[DATA_NS] = changed_ns(folder)
            counters.head[IN_USE] = 1

    @property
    def is_full(self) -> bool:
        """True if the store takes no more items."""
        head = self.counters.head
        return bool(head[FULL] or head[ENDED])

    def get_many(
        self,
        keys: Sequence[bytes],
        read: Callable[[memoryview], T],
        on_damage: Callable[[str], None],
        read_at: Callable[[memoryview, int, int], T] | None = None,
    ) -> list[T | Missing]:
        """Return ``read(record)`` for each item, or ``MISSING``.

        Args:
            keys: the items' keys.
            read: gets a view of the store's memory, which it must not keep.
            on_damage: called for each damaged item, which counts as missing.
            read_at: called in place of ``read`` with a record that stays where it is, its start in
                ``map``, and its key's number among ``keys``.
        """
        found: list[T | Missing] = []

        def look_up(env: Any, txn: Any) -> None:
            verified = self._verified
            for key in keys:
                entry = find_entry(txn, key)
                if entry is None:
                    found.append(MISSING)
                    continue
                number, checksum, record, place = entry
                is_verified = number < len(verified) and verified[number]
                if record is None or not (
                    is_verified or self._verify(number, checksum, key, record)
                ):
                    on_damage(f"item {key.hex()}")
                    found.append(MISSING)
                    continue
                if (
                    read_at is not None
                    and place is not None
                    and (start := self._start(env, record, *place)) is not None
                ):
                    found.append(read_at(record, start, len(found)))
                else:
                    found.append(read(record))

        with self._read_lock:
            self._read(look_up, on_damage)
        return found + [MISSING] * (len(keys) - len(found))

    def records(self, keys: Sequence[bytes]) -> list[tuple[int, bytes | memoryview] | None]:
        """Return checksums and stored records, None for each missing item; the caller verifies.

        Large records are views of the store's memory. It does not change while the store is open:
        no item is deleted, and LMDB never moves values with pages of their own. Small records are
        copies, since they share pages that LMDB rewrites.
        """
        found: list[tuple[int, bytes | memoryview] | None] = []

        def look_up(env: Any, txn: Any) -> None:
            for key in keys:
                entry = find_entry(txn, key)
                record = None if entry is None else entry[2]
                if entry is None or record is None:
                    found.append(None)
                else:
                    is_alone = len(record) >= BLOCK_BYTES
                    found.append((entry[1], record if is_alone else bytes(record)))

        with self._read_lock:
            self._read(look_up)
        return found + [None] * (len(keys) - len(found))

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        # The key of a file that is gone is empty, which LMDB takes for none.
        found = self._read(lambda env, txn: [bool(key and txn.get(key)) for key in keys])
        return [False] * len(keys) if found is None else found

    def totals_of(self, chain: bytes) -> tuple[int, int]:
        """Return the number of a chain's items, and their bytes; zeros if it cannot be read."""
        return self._read(lambda env, txn: chain_totals(txn, chain)) or (0, 0)

    def _read(
        self,
        read: Callable[[Any, Any], T],
        on_damage: Callable[[str], None] | None = None,
    ) -> T | None:
        """Return what ``read`` returns for the environment and a transaction; None if LMDB fails.

        ``on_damage`` is told what is damaged; by default nobody is, since `get_many` reports it.
        """
        with self._gate.door():
            env: Any = None
            try:
                env = self._environment()
                with env.begin(buffers=True) as txn:
                    return read(env, txn)
            except self._lmdb.ReadersFullError:
                env.reader_check()  # frees the slots of killed processes
            except (self._lmdb.Error, struct.error) as error:
                if on_damage is not None:
                    what = self._describe(error)
                    if what in _NO_DESCRIPTORS:  # the store is not damaged
                        raise CacheError(
                            f"cannot open the cache: {resources.no_descriptors()}"
                        ) from error
                    on_damage(what)
        return None

    def ask_for(self, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Have records read from a disk before they are looked at; a start of 0 is none."""
        if not self._is_on_disk:
            return
        for start, size in zip(starts, sizes, strict=True):
            first = start // PAGE_BYTES * PAGE_BYTES
            if start:
                self._mapped.madvise(mmap.MADV_WILLNEED, first, start + size - first)

    def _start(self, env: Any, record: memoryview, pages: int, offset: int) -> int | None:
        """Return where in the file a record begins that has this place; None if unknown.

        The caller is inside the gate, so ``env`` stays open.
        """
        start = self._starts.get(pages)
        if start is None:
            address = np.frombuffer(record, np.uint8).__array_interface__["data"][0]
            if self._base[0] is not env:
                self._base = env, _file_start(address, self._inode)
            base = self._base[1]
            if base is None:
                return None
            start = self._starts[pages] = address - base - offset
        return start + offset

    def _verify(self, number: int, checksum: int, key: bytes, record: memoryview) -> bool:
        """Verify an item that this process reads for the first time."""
        if checksum_of(key, record) != checksum:
            return False
        verified = self._verified
        if number >= len(verified):
            with self._lock:
                # By a page at least, so that not every single item extends it.
                verified.extend(bytes(max(4096, number + 1 - len(verified))))
        verified[number] = 1
        return True

    def add(self, items: Sequence[StoredItem]) -> list[StoredItem]:
        """Add as many items as the budget allows; return those that were refused.

        They did not fit, or were in the store already: existing items stay.

        Raises StoreLocked if another process is writing now; OSError if no more items can be
        written.
        """
        # The threads of a cache server share the descriptor, and with it the lock of the file.
        with self._add_lock, self._gate.door():
            try:
                fcntl.flock(self._admission, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreLocked from None
            try:
                return self._add_locked(items)
            except (self._lmdb.Error, struct.error) as error:
                head = self.counters.head
                head[ENDED] = 1
                if isinstance(error, (struct.error, *_damages(self._lmdb))):
                    head[DAMAGED] = 1
                raise OSError(self._describe(error)) from error
            finally:
                fcntl.flock(self._admission, fcntl.LOCK_UN)

    def _add_locked(self, items: Sequence[StoredItem]) -> list[StoredItem]:
        env, head = self._environment(), self.counters.head
        env.reader_check()  # slots of killed readers keep LMDB from reusing pages
        head[WRITING] = 1
        entered: dict[bytes, StoredItem] = {}
        for batch in _split_into_commits(items):
            entered |= self._add_batch(env, batch)
        # A later change time shows that another program has written.
        head[DATA_NS] = changed_ns(self.folder)
        head[WRITING] = 0
        return [item for item in items if entered.get(item.key) is not item]

    def _add_batch(self, env: Any, items: list[StoredItem]) -> dict[bytes, StoredItem]:
        """Add items, in one transaction if they all fit; return the added ones, by key."""
        head = self.counters.head
        if self.is_full:
            return {}
        try:
            return self._commit(env, items)
        except self._lmdb.MapFullError:
            if len(items) > 1:  # add them one by one, as many as fit
                each = [self._add_batch(env, [item]) for item in items]
                return {key: item for entered in each for key, item in entered.items()}
        # A large item may not fit while there is room for others: the store is full only if an item
        # of usual size does not fit.
        mean = head[PAYLOAD_BYTES] / head[ITEMS] if head[ITEMS] else 0
        free = self.limit_bytes - int(env.info()["last_pgno"] + 1) * PAGE_BYTES
        if items[0].size_bytes <= 2 * mean or free < BLOCK_BYTES:
            head[FULL] = 1
        return {}

    def _commit(self, env: Any, items: list[StoredItem]) -> dict[bytes, StoredItem]:
        """Write the items with new keys in one transaction; return them by key."""
        with env.begin(write=True) as txn:
            new = {item.key: item for item in items if txn.get(item.key) is None}
            if not new:
                return new
            items_now, payload_bytes = put_items(txn, new.values())
        head = self.counters.head
        head[ITEMS], head[PAYLOAD_BYTES] = items_now, payload_bytes
        head[USED_BYTES] = (env.info()["last_pgno"] + 1) * PAGE_BYTES
        return new

    def close(self) -> None:
        """Close all files; the object cannot be used afterwards."""
        self.before_fork()
        self.drop()

    def _environment(self) -> Any:
        """Return the environment, opened on first use. The caller is inside the gate."""
        if self._env is None:
            with self._lock:
                if self._env is None:
                    self._env = _open_environment(self.folder, self.limit_bytes)
        return self._env

    def _describe(self, error: Exception) -> str:
        """Return LMDB's message without its path."""
        return str(error).removeprefix(f"{self.folder}: ")

    def before_fork(self) -> None:
        """Close the environment, and keep it closed until ``after_fork``."""
        self._gate.shut()
        if self._env is not None:
            self._env.close()
            self._env = None
            self._base = None, None

    def after_fork(self) -> None:
        self._gate.open()

    def drop(self) -> None:
        """Close the other files; a forked child calls this alone."""
        self.counters.close()
        os.close(self._admission)


def import_lmdb() -> Any:
    """Return the ``lmdb`` module. Raises ImportError that says how to install it."""
    try:
        import lmdb
    except ImportError as error:
        raise ImportError(f"a cache needs the package lmdb ({error}): pip install lmdb") from error
    return lmdb


def _damages(lmdb: Any) -> tuple[type[Exception], ...]:
    """Return LMDB's errors for a file that is not as it was written."""
    return lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.PanicError


def changed_ns(folder: str) -> int:
    """Return the change time of the items' file. Any write changes it, and no tool can reset it."""
    return os.stat(os.path.join(folder, DATA)).st_ctime_ns


def _file_start(address: int, inode: int) -> int | None:
    """Return where in memory a file begins that is mapped around an address, None if unknown.

    LMDB does not tell where its map is; Linux does.
    """
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, _, offset, _, mapped, *_ = line.split(maxsplit=5)
                first, _, last = span.partition("-")
                if int(first, 16) <= address < int(last, 16):
                    return int(first, 16) - int(offset, 16) if int(mapped) == inode else None
    except OSError:
        pass
    return None


def _open_environment(folder: str, limit_bytes: int) -> Any:
    return import_lmdb().open(
        folder,
        map_size=limit_bytes,
        mode=0o600,
        sync=False,
        max_readers=_MAX_READERS,
        max_spare_txns=8,
    )


def _split_into_commits(items: Sequence[StoredItem]) -> Iterator[list[StoredItem]]:
    """Split items into transactions.

    In large transactions LMDB touches new memory; after each one the thread gives up the GIL, so
    small ones cost too many switches.
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
