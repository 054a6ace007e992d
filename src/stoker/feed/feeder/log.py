"""The output log: items in the order in which they are made, for readers at their own positions.

Positions are pairs of epoch and number. Nothing here waits, sends or copies. A log continues from
epoch to epoch. It keeps an item until every reader that it is owed to is done with it. This alone
bounds how far production may run ahead of the slowest reader.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

At = tuple[int, int]
"""A position: epoch, and number of an output in it."""


@dataclass(eq=False)
class LogReader:
    """A reader of a log: the log owes it items.

    Attributes:
        owner: who reads.
        at: the position of its next item.
        has_asked: whether it has asked for the epoch that it is at.
        sent: how many items it was sent and still uses.
    """

    owner: Any
    at: At
    has_asked: bool = True
    sent: int = 0


@dataclass(eq=False)
class StagedItem:
    """An item of a log: ``count`` outputs from ``number`` on.

    Attributes:
        rows: examples in it.
        nbytes: shared memory that it takes.
        payload: the packed value; None once its memory was given back.
        owed: readers that have not finished with it.
        leases: hand-overs whose receivers may still map it, whether or not they still read the log.
    """

    epoch: int
    number: int
    count: int
    rows: int
    nbytes: int
    payload: Any
    owed: set[LogReader] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)

    @property
    def begin(self) -> At:
        return self.epoch, self.number

    @property
    def end(self) -> At:
        """The number of the output after it in the epoch."""
        return self.epoch, self.number + self.count


@dataclass(frozen=True)
class EpochEnd:
    """The end of an epoch of so many outputs."""

    epoch: int
    total: int


@dataclass(frozen=True)
class Broken:
    """Stands in the log for the output at which the pipeline failed."""

    reason: str


class OutputLog:
    """Items on their way to readers; ``end`` is the position of the next output to prepare."""

    def __init__(self, at: At) -> None:
        self.end = at
        self.readers: list[LogReader] = []
        self.items: deque[StagedItem] = deque()
        self.broken: Broken | None = None
        self._totals: dict[int, int] = {}  # outputs of the epochs that have ended

    @property
    def start(self) -> At:
        """The oldest position from which a reader would still get every output."""
        start = self.end
        for item in reversed(self.items):
            adjoins = item.end == start
            if not adjoins and start[1] == 0 and item.epoch == start[0] - 1:
                adjoins = item.number + item.count == self._totals.get(item.epoch)
            if not adjoins:
                break
            start = item.begin
        return start

    @property
    def is_between_epochs(self) -> bool:
        """Whether the log stands between two epochs."""
        return self.end[1] == 0

    @property
    def is_wanted(self) -> bool:
        """Whether a reader wants the next output."""
        return self.broken is None and any(
            reader.has_asked and reader.at[0] >= self.end[0] for reader in self.readers
        )

    def has_all_from(self, at: At) -> bool:
        """True if a reader that joins at this position gets every output from there on."""
        return self.broken is None and at[0] <= self.end[0] and at >= self.start

    def join(self, owner: Any, at: At) -> LogReader:
        """Owe a new reader everything from a position on; the log ``has_all_from`` there."""
        reader = LogReader(owner, at)
        self.readers.append(reader)
        for item in self.items:
            if item.end > at:
                item.owed.add(reader)
        return reader

    def leave(self, reader: LogReader) -> list[StagedItem]:
        """Remove a reader; return the items that leave the log with it."""
        self.readers.remove(reader)
        gone = []
        for item in list(self.items):
            item.owed.discard(reader)
            if not item.owed:
                self.items.remove(item)
                gone.append(item)
        return gone

    def append(self, item: StagedItem) -> bool:
        """Append an item at ``end``; True if any reader is owed it."""
        assert item.begin == self.end
        self.end = item.end
        item.owed = {reader for reader in self.readers if reader.at < item.end}
        if item.owed:
            self.items.append(item)
        return bool(item.owed)

    def end_epoch(self) -> None:
        """Note that the current epoch has ended."""
        epoch, total = self.end
        self._totals[epoch] = total
        self.end = epoch + 1, 0
        oldest = min((reader.at[0] for reader in self.readers), default=epoch)
        for past in [e for e in self._totals if e < min(oldest, self.start[0])]:
            del self._totals[past]

    def due(self, reader: LogReader) -> StagedItem | EpochEnd | Broken | None:
        """Return a reader's next item; None while it must wait, or has not asked."""
        if not reader.has_asked:
            return None
        epoch, number = reader.at
        if epoch in self._totals and number >= self._totals[epoch]:
            return EpochEnd(epoch, self._totals[epoch])
        for item in self.items:
            if item.begin <= reader.at < item.end:
                return item
        return self.broken if reader.at >= self.end else None

    def outputs_from(self, at: At) -> int:
        """Return how many outputs are ready from a position on."""
        return sum(item.count for item in self.items if item.begin >= at)

    def hand_over(self, reader: LogReader, what: StagedItem | EpochEnd) -> None:
        """Note that a reader was sent its next item."""
        if isinstance(what, EpochEnd):
            reader.at, reader.has_asked = (what.epoch + 1, 0), False
        else:
            reader.at = what.end
            reader.sent += 1

    def finish(self, reader: LogReader, item: StagedItem) -> bool:
        """Note that a reader has finished with an item; True if the item leaves the log."""
        if reader not in item.owed:
            return False
        item.owed.discard(reader)
        reader.sent -= 1
        if not item.owed:
            self.items.remove(item)
        return not item.owed

    def slowest(self) -> set[LogReader]:
        """Return the readers that the oldest item is owed to: they set the pace."""
        return set(self.items[0].owed) if self.items else set()
