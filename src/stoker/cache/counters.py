"""Counters shared by all processes of a store: one memory-mapped file, a row a process.

Every row has one writer. Each user of a store (a pipeline or a wrapped dataset, with its workers)
has its own identity, which its rows carry.
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

# One for each process of a store's users at a time: some hundreds with many jobs of many workers.
# 256 KB.
ROWS = 2048
# Integers in a row: an identity (two), the counts, room, and ``_CHECKED``. Two cache lines, so no
# row shares one.
_WIDTH = 16
# Integers in front of the rows: one page, of which a dozen are used, so that new ones change no
# format.
_HEAD = 512

NAMES = tuple(field.name for field in fields(CacheCounts))
# Behind the two integers of the identity.
_COLUMNS = {name: column for column, name in enumerate(NAMES, 2)}
# Whether an item of the user's was found to be no random one; the last, so that counts may be
# added.
_CHECKED = _WIDTH - 1
# The head: what holds for the store.
FULL, ENDED, ITEMS, PAYLOAD_BYTES, USED_BYTES, DAMAGED, SHOWN_S, HAS_WARNED, DATA_NS = range(1, 10)
MEMBERS, MEMBERS_ALIVE, MAP_VERSION = range(10, 13)  # of a cluster


class Counters:
    """The counts of a store. One object a process: closing a second would free its rows.

    Makes the file if there is none.
    """

    SIZE_BYTES = 8 * (_HEAD + ROWS * _WIDTH)
    """Of the file: the head, then all rows."""

    def __init__(self, path: str) -> None:
        # In a folder that others may write to: no link is followed, and opening a pipe does not
        # hang.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(path, flags, 0o600)
        if os.fstat(self._descriptor).st_size != self.SIZE_BYTES:
            allocate(self._descriptor, self.SIZE_BYTES)
        self._map = mmap.mmap(self._descriptor, self.SIZE_BYTES)
        table = np.frombuffer(self._map, np.int64)
        self.head: NDArray[np.int64] = table[:_HEAD]
        self._rows = table[_HEAD:].reshape(ROWS, _WIDTH)
        self._own: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._taken: set[int] = set()
        self._unshared: dict[tuple[int, int], NDArray[np.int64]] = {}  # of those without a row
        self._lock = threading.Lock()

    def add(self, user: tuple[int, int], **counts: int) -> None:
        """Count for a user."""
        with self._lock:
            row = self._own_row(user)
            for name, count in counts.items():
                row[_COLUMNS[name]] += count

    def of(self, user: tuple[int, int] | None) -> CacheCounts:
        """Return a user's counts in all its processes; without a user, everybody's counts."""
        totals = self._rows_of(user)[:, 2 : 2 + len(NAMES)].sum(axis=0)
        return CacheCounts(*totals.tolist())

    def note_check(self, user: tuple[int, int]) -> None:
        """Note, for all processes of a user, that the check for random items has passed."""
        with self._lock:
            self._own_row(user)[_CHECKED] = 1

    def is_checked(self, user: tuple[int, int]) -> bool:
        """True if the check has passed in any of a user's processes."""
        return bool(self._rows_of(user)[:, _CHECKED].any())

    def close(self) -> None:
        """Free this process's rows; their counts stay. The object cannot be used afterwards.

        Takes no lock: in a forked child, a thread of the parent may hold it for ever.
        """
        self._own.clear()
        del self.head, self._rows
        with contextlib.suppress(BufferError):  # a snapshot of them may be alive
            self._map.close()
        os.close(self._descriptor)

    def _rows_of(self, user: tuple[int, int] | None) -> NDArray[np.int64]:
        rows = self._rows
        unshared = [row for mine, row in self._unshared.items() if user in (None, mine)]
        if user is not None:
            rows = rows[(rows[:, 0] == user[0]) & (rows[:, 1] == user[1])]
        return np.concatenate([rows, *(row[None] for row in unshared)])

    def _own_row(self, user: tuple[int, int]) -> NDArray[np.int64]:
        if user not in self._own:
            self._own[user] = self._take_row(user)
        return self._own[user]

    def _take_row(self, user: tuple[int, int]) -> NDArray[np.int64]:
        """Take a row: one of this user whose process has ended, or else an empty one."""
        own = (self._rows[:, 0] == user[0]) & (self._rows[:, 1] == user[1])
        empty = self._rows[:, 0] == 0
        for number in [*np.flatnonzero(own), *np.flatnonzero(empty)]:
            if int(number) in self._taken or not self._lock_row(int(number)):
                continue
            row: NDArray[np.int64] = self._rows[number]
            if row[0] in (0, user[0]) and row[1] in (0, user[1]):
                row[:2] = user
                self._taken.add(int(number))
                return row
        return self._unshared.setdefault(user, np.zeros(_WIDTH, np.int64))

    def _lock_row(self, number: int) -> bool:
        """Lock a row for this process, if no other has it; the kernel frees it with the process."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        return True


def read_counts(content: bytes) -> tuple[list[int], CacheCounts]:
    """Return the head of a file of counts, and the counts of everybody. Raises ValueError."""
    if len(content) != Counters.SIZE_BYTES:
        raise ValueError(f"{len(content):,} bytes are no counts")
    table = np.frombuffer(content, np.int64)
    rows = table[_HEAD:].reshape(ROWS, _WIDTH)[:, 2 : 2 + len(NAMES)]
    return table[:_HEAD].tolist(), CacheCounts(*rows.sum(axis=0).tolist())


def allocate(descriptor: int, size_bytes: int) -> None:
    """Reserve a file's blocks: on a full disk, a write to a sparse file's map kills the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
    else:
        os.ftruncate(descriptor, size_bytes)
