"""The output log: items in the order of their preparation, and readers at positions of their own.

A position is an epoch, and the number of an output in it. A log continues from epoch to epoch. It
keeps an item until all its readers are done with it, so the log's size bounds how far preparation
runs ahead of the slowest reader; ``MemoryBudget`` (``staging=``) is that bound over all logs.
Nothing in this module waits, sends or copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.basics import resources

# The default budget in batches: two jobs hold up to four, and one may be four ahead. Chosen, not
# measured.
BATCHES = 8
CHUNKS = 64
"""The default budget in chunks of examples, if the pipeline yields examples: a batch of a job takes
several chunks. Chosen, not measured."""
# Examples in a chunk: a usual batch. Each item costs a message and a wake-up, which the examples of
# a chunk share.
CHUNK_EXAMPLES = 64
# Batches that a job may hold: it works on one, and the next is ready.
_MAX_LEASED_BATCHES = 2
# Chunks that a job may hold: enough for two batches of 512 examples.
_MAX_LEASED_CHUNKS = 16

FeedPosition = tuple[int, int]
"""An epoch, and the number of an output in it."""


@dataclass(eq=False)
class LogReader:
    """A reader of a log.

    Attributes:
        owner: the session that reads.
        position: the position of its next item.
        has_requested: whether it has requested the epoch at which it is.
        sent: how many items it has received and not released.
    """

    owner: Any
    position: FeedPosition
    has_requested: bool = True
    sent: int = 0


@dataclass(eq=False)
class StagedItem:
    """An item of a log: ``count`` outputs from ``number`` on.

    Attributes:
        rows: examples in it.
        payload: the value's `Payload`; None once its memory is free.
        pending_readers: readers that have not released it.
        leases: leases of jobs that may still map it, even if they no longer read the log.
    """

    epoch: int
    number: int
    count: int
    rows: int
    payload: Any
    pending_readers: set[LogReader] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)

    @property
    def begin(self) -> FeedPosition:
        return self.epoch, self.number

    @property
    def end(self) -> FeedPosition:
        """The position of the output after it, in the same epoch."""
        return self.epoch, self.number + self.count


@dataclass(frozen=True)
class EpochEnd:
    """The end of an epoch, which had ``total`` outputs."""

    epoch: int
    total: int


@dataclass(frozen=True)
class PipelineFailed:
    """In place of the output at which the pipeline failed."""

    reason: str


class OutputLog:
    """Items that readers still need; ``end`` is the position of the next output to prepare."""

    def __init__(self, position: FeedPosition) -> None:
        self.end = position
        self.readers: list[LogReader] = []
        self.items: deque[StagedItem] = deque()
        self.broken: PipelineFailed | None = None
        self._totals: dict[int, int] = {}  # outputs of the epochs that have ended

    @property
    def start(self) -> FeedPosition:
        """The oldest position from which a reader can still get every output."""
        start = self.end
        for item in reversed(self.items):
            is_adjacent = item.end == start
            if not is_adjacent and start[1] == 0 and item.epoch == start[0] - 1:
                is_adjacent = item.number + item.count == self._totals.get(item.epoch)
            if not is_adjacent:
                break
            start = item.begin
        return start

    @property
    def is_wanted(self) -> bool:
        """True if a reader wants the next output."""
        return self.broken is None and any(
            reader.has_requested and reader.position[0] >= self.end[0] for reader in self.readers
        )

    def has_all_from(self, position: FeedPosition) -> bool:
        """True if a reader can join at this position and get every output from there on."""
        return self.broken is None and position[0] <= self.end[0] and position >= self.start

    def join(self, owner: Any, position: FeedPosition) -> LogReader:
        """Add a reader that gets every output from a position on (see ``has_all_from``)."""
        reader = LogReader(owner, position)
        self.readers.append(reader)
        for item in self.items:
            if item.end > position:
                item.pending_readers.add(reader)
        return reader

    def leave(self, reader: LogReader) -> list[StagedItem]:
        """Remove a reader; return the items that no other reader needs."""
        self.readers.remove(reader)
        removed = []
        for item in list(self.items):
            item.pending_readers.discard(reader)
            if not item.pending_readers:
                self.items.remove(item)
                removed.append(item)
        return removed

    def append(self, item: StagedItem) -> bool:
        """Append an item at ``end``; True if any reader needs it."""
        assert item.begin == self.end
        self.end = item.end
        item.pending_readers = {reader for reader in self.readers if reader.position < item.end}
        if item.pending_readers:
            self.items.append(item)
        return bool(item.pending_readers)

    def end_epoch(self) -> None:
        """Record that the current epoch has ended."""
        epoch, total = self.end
        self._totals[epoch] = total
        self.end = epoch + 1, 0
        oldest = min((reader.position[0] for reader in self.readers), default=epoch)
        for old_epoch in [e for e in self._totals if e < min(oldest, self.start[0])]:
            del self._totals[old_epoch]

    def next_for(self, reader: LogReader) -> StagedItem | EpochEnd | PipelineFailed | None:
        """Return a reader's next item; None if it must wait or has not requested the epoch."""
        if not reader.has_requested:
            return None
        epoch, number = reader.position
        if epoch in self._totals and number >= self._totals[epoch]:
            return EpochEnd(epoch, self._totals[epoch])
        for item in self.items:
            if item.begin <= reader.position < item.end:
                return item
        return self.broken if reader.position >= self.end else None

    def outputs_from(self, position: FeedPosition) -> int:
        """Return how many outputs are ready from a position on."""
        return sum(item.count for item in self.items if item.begin >= position)

    def advance(self, reader: LogReader, sent_item: StagedItem | EpochEnd) -> None:
        """Record that a reader was sent its next item."""
        if isinstance(sent_item, EpochEnd):
            reader.position, reader.has_requested = (sent_item.epoch + 1, 0), False
        else:
            reader.position = sent_item.end
            reader.sent += 1

    def finish(self, reader: LogReader, item: StagedItem) -> bool:
        """Record that a reader has released an item; True if the item leaves the log."""
        if reader not in item.pending_readers:
            return False
        item.pending_readers.discard(reader)
        reader.sent -= 1
        if not item.pending_readers:
            self.items.remove(item)
        return not item.pending_readers

    def slowest(self) -> set[LogReader]:
        """Return the readers that still need the oldest item: all others wait for them."""
        return set(self.items[0].pending_readers) if self.items else set()


class MemoryBudget:
    """The limit on items in a feeder's logs.

    It does not count items that jobs hold after they left the log: at most ``max_leases`` for each
    job.

    Args:
        limit: a number of items (batches, or chunks of examples); None for the default.
        batched: whether items are batches.

    Attributes:
        max_leases: how many items a job may hold at a time.
        largest_item_bytes: the largest item so far, in bytes.

    Raises ValueError for a limit that is too small.
    """

    def __init__(self, limit: int | None, batched: bool) -> None:
        self.max_leases = _MAX_LEASED_BATCHES if batched else _MAX_LEASED_CHUNKS
        self.largest_item_bytes = 0
        self._unit = "batches" if batched else f"chunks of up to {CHUNK_EXAMPLES} examples"
        self._items = (BATCHES if batched else CHUNKS) if limit is None else limit
        if self._items < 2 * self.max_leases:
            raise ValueError(
                f"staging= must be at least {2 * self.max_leases} {self._unit}, not {limit}"
            )

    def describe(self) -> str:
        size = (
            self.largest_item_bytes
            and f", {resources.format_bytes(self._items * self.largest_item_bytes)}"
        )
        return f"{self._items} {self._unit}{size or ''}"

    def max_logs(self) -> int:
        return max(1, self._items // self.max_leases)

    def record_size(self, nbytes: int) -> str | None:
        """Record an item's size; return why the budget cannot hold such items, or None."""
        first = not self.largest_item_bytes
        self.largest_item_bytes = max(self.largest_item_bytes, nbytes)
        if first and self._items * nbytes > resources.usable_memory_bytes():
            size = resources.format_bytes(nbytes)
            usable = resources.format_bytes(resources.usable_memory_bytes())
            return (
                f"the staging area of {self._items} items of {size} does not fit into memory: this "
                f"process can use {usable}. Give a smaller staging= (--staging)"
            )
        return None

    def room(self, logs: Sequence[OutputLog], log: OutputLog) -> int:
        """Return how many more items a log may take.

        The first log gets the room that the others leave. Each other log gets as many items as one
        job may hold.
        """
        is_first = log is logs[0]
        reserved = self.max_leases * (len(logs) - 1) if is_first else 0
        room = self._items - reserved - sum(len(each.items) for each in logs)
        return max(0, min(room, CHUNKS if is_first else self.max_leases - len(log.items)))
