"""Other members, as one process knows them: who owns what, who answers, and pending lookups."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from stoker.basics.future import OneShot
from stoker.cluster.cache_connection import CacheConnection, Record
from stoker.cluster.membership import Backoff
from stoker.cluster.owners import Member, OwnerMap

# Rankings that are kept, of recently used items; beyond that all are dropped. Chosen, not measured.
_MAX_RANKS = 1 << 16

PATIENCE_S = 5.0
"""How long a lookup waits for its answers; then missing items are read from storage. Ten times
``DEADLINE_S``, so ten cache servers in turn may be silent. Chosen, not measured."""


def key_of(number: int, rest: bytes) -> bytes:
    """Return an item's key: its number in the source, then 8 bytes that identify the contents."""
    return (number & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big") + rest


def number_of(key: bytes) -> int:
    """Return the item's number in its source, from its key."""
    return int.from_bytes(key[:8], "big")


class Found(NamedTuple):
    """An item that a member sent."""

    record: Record
    member: str
    """The member's name."""


class GetResult(NamedTuple):
    """The result of a lookup."""

    found: dict[bytes, Found]
    """The items that members sent, by key."""
    late: frozenset[bytes]
    """Keys for which no answer came in time."""


class PendingGet:
    """One lookup of several items at other members.

    Args:
        keys: the items' keys.
        on_missing: called by another thread with the keys that no member has, before ``wait``
            returns.
    """

    def __init__(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> None:
        self._open_keys = set(keys)
        self._on_missing = on_missing
        self._found: dict[bytes, Found] = {}
        self._lock = threading.Lock()
        self._done: OneShot[None] = OneShot()
        if not self._open_keys:
            self._done.give()

    def wait(self) -> GetResult:
        """Return the results when all answers are in, or after ``PATIENCE_S``."""
        with contextlib.suppress(TimeoutError):
            self._done.wait(PATIENCE_S)
        with self._lock:
            return GetResult(dict(self._found), frozenset(self._open_keys))

    def add_found(self, found: Sequence[Found]) -> None:
        """Record items that a member sent."""
        with self._lock:
            self._found.update((each.record.key, each) for each in found)
        self._resolve(each.record.key for each in found)

    def add_missing(self, keys: list[bytes]) -> None:
        """Record keys that no member has."""
        if keys and self._on_missing is not None:
            self._on_missing(keys)
        self._resolve(keys)

    def _resolve(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            was_open = bool(self._open_keys)
            self._open_keys.difference_update(keys)
            is_done = was_open and not self._open_keys
        if is_done:
            self._done.give()


class QueuedGet(NamedTuple):
    """Keys that wait to be looked up at one member."""

    pending: PendingGet
    keys: list[bytes]
    answered: frozenset[str]
    """The names of members that do not have these items."""


class RemoteNode:
    """A member on another host, as this process knows it.

    Attributes:
        member: its name and address.
        backoff: whether it answers, and when to try again.
        is_full: whether it has reported that its store is full.
        queue: the lookups that wait for it.
        is_busy: whether a thread sends its lookups now, or is about to.
        get_client, put_client: connections for lookups and for storing items, while it is alive.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.backoff = Backoff()
        self.is_full = False
        self.queue: list[QueuedGet] = []
        self.is_busy = False
        self.get_client: CacheConnection | None = None
        self.put_client: CacheConnection | None = None

    @property
    def is_alive(self) -> bool:
        """True if it answered the last time."""
        return self.backoff.is_alive

    def mark_lost(self) -> None:
        """Record that it does not answer, and close its connections."""
        self.backoff.failed()
        self.close()

    def close(self) -> None:
        """End the connections."""
        for client in (self.get_client, self.put_client):
            if client is not None:
                client.close()
        self.get_client = self.put_client = None


class MemberMap:
    """An owner map and its members' state.

    Attributes:
        owners: the owner map.
        nodes: the members in the map's order; None for this host's own store.
        others: those on other hosts.
        newest_ns: when the newest member joined.
    """

    def __init__(self, owners: OwnerMap, nodes: list[RemoteNode | None]) -> None:
        self.owners = owners
        self.nodes = nodes
        self.others = [node for node in nodes if node is not None]
        self.newest_ns = max((member.joined_ns for member in owners.members), default=0)
        self._ranks: dict[int, Sequence[int]] = {}

    def first(self, keys: Sequence[bytes]) -> list[int]:
        """Return the members that own items if all members are alive."""
        # A key is 16 bytes; the first 8 are the item's number in its source (`key_of`).
        numbers = np.frombuffer(b"".join(keys), ">u8")[::2].astype(np.uint64)
        owners: list[int] = self.owners.owners(numbers).tolist()
        return owners

    def owner_names(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of the members that own items if all members are alive."""
        return [self.owners.members[number].name for number in self.first(keys)]

    def ranking(self, key: bytes) -> Sequence[int]:
        """Return all members' numbers in the order of an item's ranking, its owner first."""
        number = number_of(key)
        ranking = self._ranks.get(number)
        if ranking is None:
            if len(self._ranks) > _MAX_RANKS:
                self._ranks.clear()
            ranking = self.owners.ranking(number) if self.nodes else ()
            self._ranks[number] = ranking
        return ranking

    def past_owners(self, key: bytes) -> list[int]:
        """Return the members that owned an item before others joined, the last of them first.

        A member owned it at some time if all members that rank before it joined later. Of n members
        that is so for about ln(n): the records in a random order.
        """
        past: list[int] = []
        oldest_ns = self.newest_ns + 1
        for number in self.ranking(key):
            joined_ns = self.owners.members[number].joined_ns
            if joined_ns < oldest_ns:
                past.append(number)
                oldest_ns = joined_ns
        return past[1:]
