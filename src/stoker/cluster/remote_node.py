"""Another member's connections and queue, and the map from items to members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stoker.cluster.backoff import Backoff
from stoker.cluster.keeper.client import KeeperClient
from stoker.cluster.pending import PendingGet
from stoker.schedule.owners import Member, OwnerMap

# Ranks that are remembered, of items looked up lately; then all are forgotten. Chosen, not
# measured.
_KEPT = 1 << 16


def key_of(place: int, rest: bytes) -> bytes:
    """Return the key of the item at a place in its source; ``rest``: 8 bytes that identify it."""
    return (place & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big") + rest


def place_of(key: bytes) -> int:
    """Return the place encoded in a key."""
    return int.from_bytes(key[:8], "big")


class QueuedGet(NamedTuple):
    """Keys that wait to be looked up at a member."""

    asked: PendingGet
    keys: list[bytes]
    answered: frozenset[str]
    """The members known to lack them."""


class RemoteNode:
    """Another member.

    Attributes:
        member: its name and address.
        backoff: whether it answers, and when to try again.
        is_full: whether it has reported that its store is full.
        errands: the lookups that wait for it.
        is_served: whether a thread sends its lookups now, or is about to.
        asking, bringing: connections for lookups and for storing items, while it is alive.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.backoff = Backoff()
        self.is_full = False
        self.errands: list[QueuedGet] = []
        self.is_served = False
        self.asking: KeeperClient | None = None
        self.bringing: KeeperClient | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it answered last time."""
        return self.backoff.is_alive

    def lost(self) -> None:
        """Note that it does not answer."""
        self.backoff.failed()
        self.close()

    def close(self) -> None:
        """End the connections."""
        for line in (self.asking, self.bringing):
            if line is not None:
                line.close()
        self.asking = self.bringing = None


class MemberMap:
    """A map, and its members' connections: None for this host's own store."""

    def __init__(self, owners: OwnerMap, peers: list[RemoteNode | None]) -> None:
        self.owners = owners
        self.peers = peers
        self._ranks: dict[int, Sequence[int]] = {}

    def first(self, key: bytes) -> str:
        """Return the name of the member that an item belongs to if all are alive."""
        return self.owners.members[self.owners.owner(place_of(key))].name

    def ranked(self, key: bytes) -> Sequence[int]:
        """Return the numbers of all members in an item's ranking, its owner first."""
        place = place_of(key)
        found = self._ranks.get(place)
        if found is None:
            if len(self._ranks) > _KEPT:
                self._ranks.clear()
            found = self.owners.ranked(place) if self.peers else ()
            self._ranks[place] = found
        return found
