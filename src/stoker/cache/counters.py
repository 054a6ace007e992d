"""Counters that all processes of a store share: one memory-mapped file with a row per process.

Each row has one writer. Each user of a store (a pipeline or a wrapped dataset, with its workers)
has an identity of its own, which its rows carry.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from stoker.stats import CacheCounts

# Rows: one for each process that uses the store at a time, some hundreds with many jobs of many
# workers. They take 256 KB.
ROWS = 2048
# Integers in a row: an identity (two), the counts, spare room, and ``_CHECKED``. Two cache lines,
# so no two rows share one.
_WIDTH = 16
# Integers before the rows: one page. A dozen are used, so that new ones do not change the format.
_HEAD = 512

NAMES = tuple(field.name for field in fields(CacheCounts))
# The counts follow the two integers of the identity.
_COLUMNS = {name: column for column, name in enumerate(NAMES, 2)}
# Whether the check for random items has passed. The last column, so that counts can be added.
_CHECKED = _WIDTH - 1
# Positions in the head, for the whole store.
FULL, ENDED, ITEMS, PAYLOAD_BYTES, USED_BYTES, DAMAGED, _, _, DATA_NS = range(1, 10)
# For a cache over several nodes. NEWEST_NS: when the newest member joined that the cache server
# knows of.
MEMBERS, MEMBERS_ALIVE, MAP_VERSION, NEWEST_NS = range(10, 14)
# IN_USE: no last user has closed the store. WRITING: a process writes to the file of items, or was
# killed within that; DATA_NS is the time of its last change otherwise.
IN_USE, WRITING = range(14, 16)


class Counters:
    """The counters of a store; makes the file if there is none.

    A process must have one object for each store: closing a second one would free the first one's
    rows, as ``lockf`` locks end with any descriptor of the file.
    """

    SIZE_BYTES = 8 * (_HEAD + ROWS * _WIDTH)
    """The size of the file: the head, then all rows."""

    def __init__(self, path: str) -> None:
        # Others may be able to write to the folder: follow no link, and do not block on a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(path, flags, 0o600)
        if os.fstat(self._descriptor).st_size != self.SIZE_BYTES:
            # On a full disk, writing to the map of a sparse file kills the process.
            os.posix_fallocate(self._descriptor, 0, self.SIZE_BYTES)
        self._map = mmap.mmap(self._descriptor, self.SIZE_BYTES)
        table = np.frombuffer(self._map, np.int64)
        self.head: NDArray[np.int64] = table[:_HEAD]
        self._rows = table[_HEAD:].reshape(ROWS, _WIDTH)
        self._own_rows: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._locked_rows: set[int] = set()
        self._unshared: dict[tuple[int, int], NDArray[np.int64]] = {}  # if all rows are taken
        self._lock = threading.Lock()

    def add(self, user: tuple[int, int], **counts: int) -> None:
        """Add to a user's counts."""
        with self._lock:
            row = self._own_row(user)
            for name, count in counts.items():
                if count:  # adding to an element of an array takes 0.1 us
                    row[_COLUMNS[name]] += count

    def of(self, user: tuple[int, int]) -> CacheCounts:
        """Return a user's counts over all its processes."""
        totals = self._rows_of(user)[:, 2 : 2 + len(NAMES)].sum(axis=0)
        return CacheCounts(*totals.tolist())

    def record_check(self, user: tuple[int, int]) -> None:
        """Record for all processes of a user that the check for random items has passed."""
        with self._lock:
            self._own_row(user)[_CHECKED] = 1

    def is_checked(self, user: tuple[int, int]) -> bool:
        """True if the check has passed in any of a user's processes."""
        return bool(self._rows_of(user)[:, _CHECKED].any())

    def begin_anew(self) -> None:
        """Free all rows, and let items enter a store again whose disk was full.

        The caller is the store's only user.
        """
        self._rows[:] = 0
        self.head[ENDED] = 0

    def write_through(self) -> None:
        """Wait until the file is on the disk, where there is one."""
        self._map.flush()

    def close(self) -> None:
        """Free this process's rows; their counts stay. The object cannot be used afterwards.

        It takes no lock: in a forked child, a thread of the parent may hold the lock for ever.
        """
        self._own_rows.clear()
        del self.head, self._rows
        with contextlib.suppress(BufferError):  # an array of the map may still be alive
            self._map.close()
        os.close(self._descriptor)

    def _rows_of(self, user: tuple[int, int]) -> NDArray[np.int64]:
        rows = self._rows[(self._rows[:, 0] == user[0]) & (self._rows[:, 1] == user[1])]
        unshared = self._unshared.get(user)
        return rows if unshared is None else np.vstack([rows, unshared])

    def _own_row(self, user: tuple[int, int]) -> NDArray[np.int64]:
        if user not in self._own_rows:
            self._own_rows[user] = self._take_row(user)
        return self._own_rows[user]

    def _take_row(self, user: tuple[int, int]) -> NDArray[np.int64]:
        """Return a row of this user whose process has ended, or an empty row."""
        is_own = (self._rows[:, 0] == user[0]) & (self._rows[:, 1] == user[1])
        is_empty = self._rows[:, 0] == 0
        for number in [*np.flatnonzero(is_own), *np.flatnonzero(is_empty)]:
            if int(number) in self._locked_rows or not self._lock_row(int(number)):
                continue
            row: NDArray[np.int64] = self._rows[number]
            if row[0] in (0, user[0]) and row[1] in (0, user[1]):
                row[:2] = user
                self._locked_rows.add(int(number))
                return row
        return self._unshared.setdefault(user, np.zeros(_WIDTH, np.int64))

    def _lock_row(self, number: int) -> bool:
        """Lock a row for this process if it is free; the kernel unlocks it with the process."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        return True


def read_head(content: bytes) -> list[int]:
    """Return the head of a counters file. Raises ValueError."""
    if len(content) != Counters.SIZE_BYTES:
        raise ValueError(f"a file of {len(content):,} bytes holds no counters")
    head: list[int] = np.frombuffer(content, np.int64, _HEAD).tolist()
    return head
