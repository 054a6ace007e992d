"""Who is owed what: an ordered run of items for several members, each at its own position.

Positions are pairs of epoch and number; nothing here waits, sends or copies. A lane runs on from
epoch to epoch. An item stands in it until every member that it is owed to is done with it; that is
all that bounds how far production may go ahead of the slowest member.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

At = tuple[int, int]
"""A position: epoch, and number of an output in it."""


@dataclass(eq=False)
class Member:
    """One that a lane owes items to.

    Attributes:
        owner: whose membership it is.
        at: what it is to get next.
        asked: whether it has asked for the epoch that it is at.
        sent: how many items were handed to it that it is not done with.
    """

    owner: Any
    at: At
    asked: bool = True
    sent: int = 0


@dataclass(eq=False)
class StagedItem:
    """An item that stands in a lane: ``count`` outputs from ``number`` on.

    Attributes:
        rows: examples in it.
        nbytes: shared memory that it takes.
        cargo: what is handed over.
        owed: members that are not done with it.
        lent: hand-overs whose receivers may look at it, members or not any more.
    """

    epoch: int
    number: int
    count: int
    rows: int
    nbytes: int
    cargo: Any
    owed: set[Member] = field(default_factory=set)
    lent: set[int] = field(default_factory=set)

    @property
    def begin(self) -> At:
        """Where it begins."""
        return self.epoch, self.number

    @property
    def end(self) -> At:
        """Where what follows it in the epoch begins."""
        return self.epoch, self.number + self.count


@dataclass(frozen=True)
class EpochEnd:
    """Stands for the end of an epoch of so many outputs."""

    epoch: int
    total: int


@dataclass(frozen=True)
class Broken:
    """Stands for the output that the pipeline failed at."""

    reason: str


class OutputLog:
    """Items on their way to members.

    Args:
        at: where production begins.
    """

    def __init__(self, at: At) -> None:
        self.made = at
        self.members: list[Member] = []
        self.items: deque[StagedItem] = deque()
        self.ended: dict[int, int] = {}
        self.broken: Broken | None = None

    @property
    def floor(self) -> At:
        """The oldest position from which on everything still stands here, or will come."""
        floor = self.made
        for item in reversed(self.items):
            whole = item.end == floor
            if not whole and floor[1] == 0 and item.epoch == floor[0] - 1:
                whole = item.number + item.count == self.ended.get(item.epoch)
            if not whole:
                break
            floor = item.begin
        return floor

    @property
    def at_boundary(self) -> bool:
        """Whether an epoch is to begin next, and has not begun."""
        return self.made[1] == 0

    @property
    def wanted(self) -> bool:
        """Whether a member wants what is to be made next."""
        return self.broken is None and any(
            m.asked and m.at[0] >= self.made[0] for m in self.members
        )

    def reaches(self, at: At) -> bool:
        """Tell whether a member that joined at this position would get everything from it on."""
        return self.broken is None and at[0] <= self.made[0] and at >= self.floor

    def join(self, owner: Any, at: At) -> Member:
        """Owe a new member everything from a position on, which the lane ``reaches``."""
        member = Member(owner, at)
        self.members.append(member)
        for item in self.items:
            if item.end > at:
                item.owed.add(member)
        return member

    def leave(self, member: Member) -> list[StagedItem]:
        """Owe a member nothing any more; return the items that leave the lane with it."""
        self.members.remove(member)
        gone = []
        for item in list(self.items):
            item.owed.discard(member)
            if not item.owed:
                self.items.remove(item)
                gone.append(item)
        return gone

    def add(self, item: StagedItem) -> bool:
        """Take what was made, at ``made``; return whether anybody is owed it."""
        assert item.begin == self.made
        self.made = item.end
        item.owed = {m for m in self.members if m.at < item.end}
        if item.owed:
            self.items.append(item)
        return bool(item.owed)

    def end_epoch(self) -> None:
        """Note that the epoch that was being made has ended."""
        epoch, total = self.made
        self.ended[epoch] = total
        self.made = epoch + 1, 0
        oldest = min((m.at[0] for m in self.members), default=epoch)
        for past in [e for e in self.ended if e < min(oldest, self.floor[0])]:
            del self.ended[past]

    def due(self, member: Member) -> StagedItem | EpochEnd | Broken | None:
        """Return what a member is to get now; None while it has to wait, or has not asked."""
        if not member.asked:
            return None
        epoch, number = member.at
        if epoch in self.ended and number >= self.ended[epoch]:
            return EpochEnd(epoch, self.ended[epoch])
        for item in self.items:
            if item.begin <= member.at < item.end:
                return item
        return self.broken if member.at >= self.made else None

    def hand_over(self, member: Member, what: StagedItem | EpochEnd) -> None:
        """Note that a member was given what it was due."""
        if isinstance(what, EpochEnd):
            member.at, member.asked = (what.epoch + 1, 0), False
        else:
            member.at = what.end
            member.sent += 1

    def done(self, member: Member, item: StagedItem) -> bool:
        """Note that a member is done with an item; return whether it leaves the lane."""
        if member not in item.owed:
            return False
        item.owed.discard(member)
        member.sent -= 1
        if not item.owed:
            self.items.remove(item)
        return not item.owed

    def slowest(self) -> set[Member]:
        """Return the members that the oldest item is owed to: they set the pace."""
        return set(self.items[0].owed) if self.items else set()
