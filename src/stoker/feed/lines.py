"""The lanes of a feeder, each with what is made for it; and which of them a job is served from.

The oldest lane is the one that new jobs join, where an epoch begins. Others make again what a job
missed, until what it needs next stands in an older one.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from stoker.chain import Chain
from stoker.feed.log import At, Member, OutputLog
from stoker.feed.producer import PARCEL_EXAMPLES, Producer
from stoker.feed.served import Served
from stoker.feed.staging import BATCHES, PARCELS, Staging
from stoker.ipc.blocks import Blocks

_JOIN_S = 5.0


class Line:
    """A lane, and what is made for it.

    Attributes:
        making: whether an epoch is being made.
        arrived: how many items have come.
        blocked_since_s: since when a member waits while there is no room.
    """

    def __init__(self, at: At, production: Producer) -> None:
        self.lane = OutputLog(at)
        self.production = production
        self.making = False
        self.arrived = 0
        self.blocked_since_s: float | None = None
        if at[1]:
            self._begin()

    def go_on(self) -> None:
        """Begin the next epoch, if a member wants it."""
        if self.lane.at_boundary and not self.making and self.lane.wanted:
            self._begin()

    def _begin(self) -> None:
        self.making = True
        self.production.begin(*self.lane.made)

    def allow(self, room: int, lent: int) -> None:
        """Let so many items more be made; note whether somebody waits for others to make room."""
        lane = self.lane
        free = room if lane.wanted else 0
        self.production.allow(self.arrived + free)
        starved = not free and any(
            m.asked and m.sent < lent and lane.due(m) is None for m in lane.members
        )
        if not starved or not lane.items:
            self.blocked_since_s = None
        elif self.blocked_since_s is None:
            self.blocked_since_s = time.monotonic()

    @property
    def stuck(self) -> bool:
        """Whether members wait for others that have not taken what stands here."""
        return self.blocked_since_s is not None and bool(self.lane.items)

    def silent_since_s(self, *members: Member) -> float:
        """Return since when the quietest of those that hold up a stuck lane says nothing."""
        assert self.blocked_since_s is not None
        heard: list[float] = [m.owner.heard_s for m in members or self.lane.slowest()]
        return max(self.blocked_since_s, min(heard))


class Lines:
    """All lanes, the oldest first.

    Args:
        chain: what is served.
        about: what jobs are told of it.
        staging: bounds what stands in them.
        wake: an event descriptor that is written to when something was made.

    Attributes:
        arrivals: what was made, with its line, to be taken in by who reads ``wake``.
    """

    def __init__(
        self, chain: Chain, about: Served, blocks: Blocks, staging: Staging, wake: int
    ) -> None:
        self._chain = chain
        self._about = about
        self._blocks = blocks
        self._staging = staging
        self._wake = wake
        self._near = 2 * (BATCHES if about.batched else PARCELS * PARCEL_EXAMPLES)
        self._all: list[Line] = []
        self._closed: list[Producer] = []
        self.arrivals: deque[tuple[Line, Any]] = deque()

    def __iter__(self) -> Any:
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, line: Line) -> bool:
        return line in self._all

    @property
    def lanes(self) -> list[OutputLog]:
        """The lanes, the oldest first."""
        return [line.lane for line in self._all]

    def place_for(self, want: At | None) -> tuple[Line, At] | None:
        """Return a line and a position in it, opening one where none will do; None to wait.

        Args:
            want: what a job is to get next; None for the beginning of any epoch.
        """
        whole = [line for line in self._all if line.lane.broken is None]
        if want is None:
            if not whole:
                return self._open((0, 0)), (0, 0)
            start = whole[0].lane.made[0], 0
            return (whole[0], start) if whole[0].lane.reaches(start) else None
        able = [line for line in whole if line.lane.reaches(want)]
        near = [line for line in able if self._is_near(want, line)]
        if near:
            return near[0], want
        if want[1] == 0 and any(line.lane.made[0] == want[0] - 1 for line in whole):
            return None  # it will come to that
        if len(self._all) < (self._staging.lanes() if self._about.again else 1):
            return self._open(want), want
        return (able[0], want) if able else None

    def older(self, line: Line, member: Member) -> Line | None:
        """Return an older line that has what a member needs next."""
        for other in self._all[: self._all.index(line)]:
            if self._is_near(member.at, other) and other.lane.reaches(member.at):
                return other
        return None

    def close_deserted(self) -> bool:
        """Close the lines without members; tell whether there were any."""
        deserted = [line for line in self._all if not line.lane.members]
        for line in deserted:
            self._all.remove(line)
            line.production.close()
            self._closed = [p for p in self._closed if not p.join(0)] + [line.production]
        return bool(deserted)

    def close(self, patience_s: float) -> None:
        """End; threads that are still at work after a while are left alone."""
        productions = [*self._closed, *(line.production for line in self._all)]
        for production in productions:
            production.close()
        for production in productions:
            production.join(patience_s)

    def _is_near(self, at: At, line: Line) -> bool:
        """Whether a line comes to a position before making it again would."""
        return at[1] - line.lane.made[1] <= self._near

    def _open(self, at: At) -> Line:
        def tell(what: Any) -> None:
            self.arrivals.append((line, what))
            os.eventfd_write(self._wake, 1)

        if not self._about.again:  # a loader is iterated once at a time
            for production in self._closed:
                production.join(_JOIN_S)
        line = Line(at, Producer(self._chain, self._blocks, self._about.batched, tell))
        self._all.append(line)
        return line
