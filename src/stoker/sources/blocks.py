"""Block cache: row groups or runs of a shard, kept in memory while there is room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from stoker.basics.future import OneShot
from stoker.basics.process import OwningProcess


class HeldBlocks:
    """The most recently used blocks, by key; one thread reads each, and others wait for it.

    Those that are being read come on top of ``limit_bytes``. Pickles as an empty one.
    ``rows_read`` counts the examples that were read in this process. A block, such as a table, has
    ``num_rows`` examples and ``nbytes``.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._begin()

    def __reduce__(self) -> tuple[object, ...]:
        return HeldBlocks, (self.limit_bytes,)

    def __contains__(self, key: Hashable) -> bool:
        """True if a block is held, or is being read."""
        return key in self._held

    def get(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return a block that is held, or what ``read`` returns; raises what that raises."""
        if not self._owner.is_current:  # a forked child: its parent's threads give nothing here
            self._begin()
        mine: OneShot[Any] | None = None
        try:
            with self._lock:
                found = self._held.pop(key, None)
                if found is None:
                    found = mine = OneShot()
                self._held[key] = found  # the last one is what was used last
            if mine is None:
                return found.wait()
            block = read()
        except BaseException as error:
            if mine is None:
                raise
            with self._lock:
                if self._held.get(key) is mine:
                    del self._held[key]
            passed = error if isinstance(error, Exception) else OSError("reading was interrupted")
            mine.give(error=passed)
            raise
        mine.give(block)
        with self._lock:
            self.rows_read += block.num_rows
            self._sizes[mine] = block.nbytes
            self._nbytes += block.nbytes
            for other, held in list(self._held.items()):  # the one that was used longest ago first
                if self._nbytes > self.limit_bytes and held is not mine and held in self._sizes:
                    del self._held[other]
                    self._nbytes -= self._sizes.pop(held)
        return block

    def _begin(self) -> None:
        self._owner = OwningProcess()
        self._lock = threading.Lock()
        self._held: dict[Hashable, OneShot[Any]] = {}
        self._sizes: dict[OneShot[Any], int] = {}  # of those that have been read
        self._nbytes = 0
        self.rows_read = 0
