"""Branches of a feed: each is an output log, and the producer that fills it.

A new job joins the oldest branch at the beginning of an epoch, or while the epoch's first item is
still in the log. A job that requests a position that no branch will reach gets a branch of its own.
The job moves to an older branch as soon as that branch has the job's next output.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator

from stoker.chain.chain import Chain
from stoker.feeds.feeder.log import (
    BATCHES,
    CHUNK_EXAMPLES,
    CHUNKS,
    FeedPosition,
    LogReader,
    MemoryBudget,
    OutputLog,
)
from stoker.feeds.feeder.preparation import Event, FeedSpec, Producer
from stoker.feeds.shared_memory import Blocks

# How long closing waits for threads. A user would wait so long without an explanation. Chosen, not
# measured.
_JOIN_S = 5.0


class Branch:
    """A log, and the producer that fills it.

    Attributes:
        is_preparing: whether an epoch is being prepared.
        item_count: how many items the producer has delivered.
    """

    def __init__(self, position: FeedPosition, producer: Producer) -> None:
        self.log = OutputLog(position)
        self.producer = producer
        self.is_preparing = False
        self.item_count = 0
        self._blocked_since_s: float | None = None  # readers wait, and the log is full
        if position[1]:
            self._begin()

    def start_next_epoch(self) -> None:
        """Begin the next epoch if a reader wants it."""
        if self.log.end[1] == 0 and not self.is_preparing and self.log.is_wanted:
            self._begin()

    def _begin(self) -> None:
        self.is_preparing = True
        self.producer.begin(self.log.end)

    def allow(self, room: int, max_leases: int, *, is_awaited: bool) -> None:
        """Allow ``room`` more items; record whether anybody waits for readers to make room.

        Other readers may, or with ``is_awaited`` a job that waits for this branch's next epoch.
        """
        log = self.log
        free = room if log.is_wanted else 0
        self.producer.allow(self.item_count + free)
        is_starved = not free and (
            is_awaited
            or any(
                reader.has_requested and reader.sent < max_leases and log.next_for(reader) is None
                for reader in log.readers
            )
        )
        if not is_starved or not log.items:
            self._blocked_since_s = None
        elif self._blocked_since_s is None:
            self._blocked_since_s = time.monotonic()

    def waited_s(self, since_s: float, now_s: float) -> float:
        """Return for how many seconds between two times readers waited for the slowest ones."""
        return 0.0 if self._blocked_since_s is None else now_s - max(since_s, self._blocked_since_s)

    def silent_since_s(self, *readers: LogReader) -> float | None:
        """Return since when these readers (by default the slowest ones) have sent no message.

        Return None while no other reader waits for them.
        """
        if self._blocked_since_s is None or not self.log.items:
            return None
        last_message_s: list[float] = [
            reader.owner.last_message_s for reader in readers or self.log.slowest()
        ]
        return max(self._blocked_since_s, min(last_message_s))


class Branches:
    """All branches, the oldest first. The event descriptor ``wake`` is set when an output is ready.

    Attributes:
        arrivals: new outputs and their branches; `collect` empties it.
    """

    def __init__(
        self, chain: Chain, about: FeedSpec, blocks: Blocks, staging: MemoryBudget, wake: int
    ) -> None:
        self._chain = chain
        self._about = about
        self._blocks = blocks
        self._staging = staging
        self._wake = wake
        self._near_outputs = 2 * (BATCHES if about.batched else CHUNKS * CHUNK_EXAMPLES)
        self._all: list[Branch] = []
        self._closed: list[Producer] = []
        self.arrivals: deque[tuple[Branch, Event]] = deque()

    def __iter__(self) -> Iterator[Branch]:
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def logs(self) -> list[OutputLog]:
        """The logs, the oldest first."""
        return [branch.log for branch in self._all]

    def find(self, want: FeedPosition | None) -> tuple[Branch, FeedPosition] | None:
        """Return a branch and a position in it; open a branch if none fits. None: the job waits.

        ``want`` is the requested position; None for the beginning of any epoch.
        """
        intact = [branch for branch in self._all if not branch.log.broken]
        if want is None:
            if not intact:
                return self._open((0, 0)), (0, 0)
            start = intact[0].log.end[0], 0
            return (intact[0], start) if intact[0].log.has_all_from(start) else None
        candidates = [branch for branch in intact if branch.log.has_all_from(want)]
        nearby = [branch for branch in candidates if self._is_near(want, branch)]
        if nearby:
            return nearby[0], want
        if want[1] == 0 and any(branch.log.end[0] == want[0] - 1 for branch in intact):
            return None  # that branch begins this epoch next
        if len(self._all) < (self._staging.max_logs() if self._about.is_repeatable else 1):
            return self._open(want), want
        return (candidates[0], want) if candidates else None

    def collect(self) -> Iterator[tuple[Branch, Event]]:
        """Yield new outputs of branches that still exist."""
        while self.arrivals:
            branch, event = self.arrivals.popleft()
            if branch in self._all:  # else nobody was sent it: it goes with its last reference
                yield branch, event

    def older(self, branch: Branch, reader: LogReader) -> Branch | None:
        """Return an older branch that has a reader's next output; None if there is none."""
        for other in self._all[: self._all.index(branch)]:
            if self._is_near(reader.position, other) and other.log.has_all_from(reader.position):
                return other
        return None

    def close_unused(self) -> bool:
        """Close branches without readers; True if there were any."""
        unused = [branch for branch in self._all if not branch.log.readers]
        for branch in unused:
            self._all.remove(branch)
            branch.producer.close()
            self._closed = [p for p in self._closed if not p.join(0)] + [branch.producer]
        return bool(unused)

    def close(self) -> None:
        """Close all branches, and wait up to 5 s for each thread."""
        producers = [*self._closed, *(branch.producer for branch in self._all)]
        for producer in producers:
            producer.close()
        for producer in producers:
            producer.join(_JOIN_S)

    def _is_near(self, position: FeedPosition, branch: Branch) -> bool:
        """True if a branch reaches a position sooner than a new branch would."""
        return position[1] - branch.log.end[1] <= self._near_outputs

    def _open(self, position: FeedPosition) -> Branch:
        def report(event: Event) -> None:
            self.arrivals.append((branch, event))
            os.eventfd_write(self._wake, 1)

        if not self._about.is_repeatable:  # a loader must not be iterated twice at the same time
            for producer in self._closed:
                producer.join(_JOIN_S)
        branch = Branch(position, Producer(self._chain, self._blocks, report))
        self._all.append(branch)
        return branch
