"""The output log: items in the order of their preparation, and readers at positions of their own.

A position is an epoch, and the number of an output in it. A log continues from epoch to epoch. It
keeps an item until all its readers are done with it, so the log's size bounds how far preparation
runs ahead of the slowest reader. Nothing in this module waits, sends or copies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

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
    def is_between_epochs(self) -> bool:
        """True if the next output is the first of an epoch."""
        return self.end[1] == 0

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
