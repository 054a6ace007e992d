"""The staging area: how many items or bytes shared memory may hold at a time."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.basics import resources
from stoker.feed.feeder.log import OutputLog

# As many as two jobs are lent, twice over: the fastest may be ahead by them. Chosen, not measured.
BATCHES = 8
CHUNKS = 64
"""Items in the staging area, unless the user says otherwise: batches, or chunks of examples, of
which a batch may take several."""
# A usual batch: a hand-over is a message and a wake-up, which small examples share.
CHUNK_EXAMPLES = 64
# One that a job works on, one that waits for it.
_LENT_BATCHES = 2
# Several make up a job's batch: of up to 512 examples it may hold two.
_LENT_CHUNKS = 16


class MemoryBudget:
    """The limit on items in a feeder's logs.

    Items that a job still holds after they left its log, or that a frozen job holds, are not
    counted: at most ``lent`` items for each job.

    ``limit`` is a number of items, or bytes as text such as "2GiB"; None for the default. Items are
    batches, or else chunks of examples.

    Attributes:
        lent: how many items a job may hold at a time.
        most_bytes: the largest item so far, in bytes.

    Raises ValueError for a limit that is too small, or does not fit into memory.
    """

    def __init__(self, limit: int | str | None, batched: bool) -> None:
        self.lent = _LENT_BATCHES if batched else _LENT_CHUNKS
        self.most_bytes = 0
        self._what = "batches" if batched else f"chunks of up to {CHUNK_EXAMPLES} examples"
        self._items: int | None = None
        self._bytes = 0
        if isinstance(limit, str):
            self._bytes = resources.parse_bytes(limit)
            usable = resources.usable_memory_bytes()
            if self._bytes > usable:
                raise ValueError(
                    f"a staging area of {limit} does not fit: {resources.format_bytes(usable)} of "
                    "memory are left to this process"
                )
            return
        self._items = (BATCHES if batched else CHUNKS) if limit is None else limit
        if self._items < 2 * self.lent:
            raise ValueError(
                f"a staging area holds at least {2 * self.lent} {self._what}, not {limit}"
            )

    def text(self) -> str:
        if self._items is None:
            return resources.format_bytes(self._bytes)
        size = self.most_bytes and f", {resources.format_bytes(self._items * self.most_bytes)}"
        return f"{self._items} {self._what}{size or ''}"

    def most_logs(self) -> int:
        return max(1, (self._items or 4 * self.lent) // self.lent)

    def note_size(self, nbytes: int) -> str | None:
        """Note an item's size; return why the staging area cannot hold its limit, or None."""
        first = not self.most_bytes
        self.most_bytes = max(self.most_bytes, nbytes)
        size = resources.format_bytes(nbytes)
        least = 2 * self.lent
        if self._items is None and least * nbytes > self._bytes:
            return (
                f"the staging area of {resources.format_bytes(self._bytes)} is too small: at least "
                f"{least} of {size} each must fit (--staging)"
            )
        if self._items and first and self._items * nbytes > resources.usable_memory_bytes():
            usable = resources.format_bytes(resources.usable_memory_bytes())
            return (
                f"a staging area of {self._items} times {size} does not fit: {usable} of memory "
                "are left; give it fewer (--staging)"
            )
        return None

    def room(self, logs: Sequence[OutputLog], log: OutputLog) -> int:
        """Return how many more items a log may take.

        The first log gets the room that the others leave; each other log gets what one job may
        hold.
        """
        is_first = log is logs[0]
        beside = self.lent * (len(logs) - 1) if is_first else 0
        staged = [item for each in logs for item in each.items]
        if self._items is not None:
            room = self._items - beside - len(staged)
        elif self.most_bytes:
            room = (self._bytes - sum(item.nbytes for item in staged)) // self.most_bytes - beside
        else:
            room = 1  # the first one tells how large they are
        return max(0, min(room, CHUNKS if is_first else self.lent - len(log.items)))
