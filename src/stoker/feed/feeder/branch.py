"""Branches of a feed: output logs, each with the producer that fills it.

New jobs join the oldest branch at the beginning of an epoch, or while its first item is still
there. A job that asks for a position that no branch will reach gets its own branch. After filters
and echoes that branch prepares the earlier outputs again, since any output can be prepared by its
number. The job moves to an older branch as soon as that branch has the job's next output.

A relay does not know in advance where the next epoch of its feed begins. Its first branch is
*opening* until the feed reports that; jobs that wait for any epoch wait for this branch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator

from stoker.feed.feeder.log import At, Broken, LogReader, OutputLog, StagedItem
from stoker.feed.feeder.memory_budget import BATCHES, CHUNK_EXAMPLES, CHUNKS, MemoryBudget
from stoker.feed.feeder.preparation import Preparation
from stoker.feed.feeder.producer import Begun, Produced, Producer
from stoker.transport.shared_memory import Blocks

# As long as a user waits without a word for examples that are under way.
_JOIN_S = 5.0


class Branch:
    """A log, and the producer that fills it.

    Attributes:
        is_making: whether an epoch is being prepared.
        is_placed: whether its start position is known.
        is_opening: whether jobs that wait for this branch have not joined it yet.
        arrived: how many items the producer has delivered.
    """

    def __init__(self, at: At | None, producer: Producer) -> None:
        self.log = OutputLog(at or (0, 0))
        self.producer = producer
        self.is_making = self.is_opening = at is None
        self.is_placed = at is not None
        self.arrived = 0
        self._blocked_since_s: float | None = None  # readers wait, and there is no room
        if at is None:
            producer.begin(None)
        elif at[1]:
            self._begin()

    def go_on(self) -> None:
        """Begin the next epoch, if a reader wants it."""
        if self.log.is_between_epochs and not self.is_making and self.log.is_wanted:
            self._begin()

    def _begin(self) -> None:
        self.is_making = True
        self.producer.begin(self.log.end)

    def allow(self, room: int, lent: int) -> None:
        """Let so many items more be made; note whether readers wait for others to make room."""
        log = self.log
        free = room if log.is_wanted else 0
        self.producer.allow(self.arrived + free)
        starved = not free and any(
            reader.has_asked and reader.sent < lent and log.due(reader) is None
            for reader in log.readers
        )
        if not starved or not log.items:
            self._blocked_since_s = None
        elif self._blocked_since_s is None:
            self._blocked_since_s = time.monotonic()

    def waited_s(self, since_s: float, now_s: float) -> float:
        """Return how many seconds, between two times, readers have waited for the slowest."""
        return 0.0 if self._blocked_since_s is None else now_s - max(since_s, self._blocked_since_s)

    def silent_since_s(self, *readers: LogReader) -> float | None:
        """Return the time of the oldest last message among these, or among the slowest readers.

        None while no reader waits for them.
        """
        if self._blocked_since_s is None or not self.log.items:
            return None
        heard_s: list[float] = [reader.owner.heard_s for reader in readers or self.log.slowest()]
        return max(self._blocked_since_s, min(heard_s))


class Branches:
    """All branches, the oldest first. The event descriptor ``wake`` is set when an output is ready.

    Attributes:
        arrivals: new outputs with their branches; the reader of ``wake`` takes them in.
        failed: why no epoch begins; waiting jobs are told.
    """

    failed: Broken | None = None

    def __init__(
        self, prepared: Preparation, blocks: Blocks, staging: MemoryBudget, wake: int
    ) -> None:
        self._prepared = prepared
        self._about = about = prepared.about
        self._blocks = blocks
        self._staging = staging
        self._wake = wake
        self._near = 2 * (BATCHES if about.batched else CHUNKS * CHUNK_EXAMPLES)
        self._all: list[Branch] = []
        self._closed: list[Producer] = []
        self.arrivals: deque[tuple[Branch, Produced]] = deque()

    def __iter__(self) -> Iterator[Branch]:
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, branch: Branch) -> bool:
        return branch in self._all

    @property
    def logs(self) -> list[OutputLog]:
        """The logs, the oldest first."""
        return [branch.log for branch in self._all]

    def find(self, want: At | None) -> tuple[Branch, At] | None:
        """Return a branch and a position in it, opening a branch if none fits; None to wait.

        A job that wants None takes the beginning of any epoch.
        """
        whole = [branch for branch in self._all if branch.is_placed and not branch.log.broken]
        if want is None:
            if not whole:
                return self._open_first()
            start = whole[0].log.end[0], 0
            return (whole[0], start) if whole[0].log.has_all_from(start) else None
        able = [branch for branch in whole if branch.log.has_all_from(want)]
        near = [branch for branch in able if self._is_near(want, branch)]
        if near:
            return near[0], want
        if want[1] == 0 and any(branch.log.end[0] == want[0] - 1 for branch in whole):
            return None  # it will come to that
        if len(self._all) < (self._staging.most_logs() if self._about.again else 1):
            return self._open(want), want
        return (able[0], want) if able else None

    def take_in(self) -> Iterator[tuple[Branch, Produced]]:
        """Yield new outputs of branches that still exist; note where new epochs begin."""
        while self.arrivals:
            branch, what = self.arrivals.popleft()
            if branch not in self._all:
                if isinstance(what, StagedItem):
                    what.payload.retire()
            elif isinstance(what, Begun):
                branch.is_placed = True
                branch.log.end = what.at
            elif isinstance(what, Broken) and not branch.is_placed:
                branch.is_opening = False
                self.failed = branch.log.broken = what
            else:
                yield branch, what

    def older(self, branch: Branch, reader: LogReader) -> Branch | None:
        """Return an older branch that has what a reader needs next."""
        for other in self._all[: self._all.index(branch)]:
            if self._is_near(reader.at, other) and other.log.has_all_from(reader.at):
                return other
        return None

    def close_deserted(self) -> bool:
        """Close the branches without readers; True if there were any."""
        deserted = [b for b in self._all if not b.log.readers and not b.is_opening]
        for branch in deserted:
            self._all.remove(branch)
            branch.producer.close()
            self._closed = [p for p in self._closed if not p.join(0)] + [branch.producer]
        return bool(deserted)

    def close(self) -> None:
        """End; threads that still run after a while are left alone."""
        producers = [*self._closed, *(branch.producer for branch in self._all)]
        for producer in producers:
            producer.close()
        for producer in producers:
            producer.join(_JOIN_S)

    def _is_near(self, at: At, branch: Branch) -> bool:
        """Whether a branch reaches a position sooner than preparing it again would."""
        return at[1] - branch.log.end[1] <= self._near

    def _open_first(self) -> tuple[Branch, At] | None:
        start = self._prepared.start
        if start is not None:
            return self._open(start), start
        if all(branch.is_placed for branch in self._all):
            self._open(None)
        return None

    def note_seated(self) -> None:
        """Note that every job that waited for a newly placed branch had its chance to join."""
        for branch in self._all:
            branch.is_opening = branch.is_opening and not branch.is_placed

    def _open(self, at: At | None) -> Branch:
        def tell(what: Produced) -> None:
            self.arrivals.append((branch, what))
            os.eventfd_write(self._wake, 1)

        if not self._about.again:  # a loader is iterated once at a time
            for producer in self._closed:
                producer.join(_JOIN_S)
        outputs = self._prepared.outputs(self._blocks)
        branch = Branch(at, Producer(outputs, self._blocks, tell))
        self._all.append(branch)
        return branch
