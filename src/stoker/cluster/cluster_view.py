"""A process's view of the cluster: the owner map, which members answer, and which have room.

Each item ranks the members (``OwnerMap``) and belongs to the first one that is alive. A process
that lacks an item asks that member and the next one, and then each member that owned the item
before others joined. If none has the item, it is read from storage and stored at the first of the
two that has room. So if a member is lost, each of its items is read from storage once more. If a
member joins or returns, other processes still find its items where they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice

from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.keeper.client import KeeperClient
from stoker.cluster.owners import OwnerMap
from stoker.cluster.remote_node import MemberMap, RemoteNode

# Members that an item may be stored at: its owner, and the next in the ranking, which has the item
# while the owner is full or does not answer.
_MAX_HOLDERS = 2

LOCAL = "local"
"""In place of a member's name: the store on this host."""


class ClusterView:
    """The members of a cluster as one process knows them.

    Args:
        token: the cluster's secret.
        spec: the specification of this process's cache.
        local_has_room: returns whether this host's store has room.
        on_change: called with the number of members, the number that answer, and the map's version.

    Attributes:
        lock: guards the state of all members and all their queues. Code that holds it never waits
            for another node.
        changed: a condition over ``lock``; notified when there is work.
        has_lookups: another one, notified when there are lookups to send: ``changed`` would wake
            every thread of the client for each.
        is_closed: whether the cache is closed in this process.
        map: the owner map, and the state of its members.
    """

    def __init__(
        self,
        token: bytes,
        spec: CacheSpec,
        local_has_room: Callable[[], bool],
        on_change: Callable[[int, int, int], None],
    ) -> None:
        self._token = token
        self._spec = spec
        self._local_has_room = local_has_room
        self._on_change = on_change
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.has_lookups = threading.Condition(self.lock)
        self.is_closed = False
        self.map = MemberMap(OwnerMap.of((), 0), [])

    @property
    def others(self) -> list[RemoteNode]:
        """The members on other hosts, in the map's order."""
        return [node for node in self.map.nodes if node is not None]

    @property
    def has_room(self) -> bool:
        """True if this host's store, or any live member's, has room."""
        return self._local_has_room() or any(
            node.is_alive and not node.is_full for node in self.others
        )

    def choose_store(self, key: bytes, before: str | None = None) -> str | None:
        """Return the name of the member that should store an item, or ``LOCAL``; None if none can.

        With ``before``, only members that rank before that member are considered.
        """
        with self.lock:
            members_map, alive_count = self.map, 0
            for number in members_map.ranking(key):
                node = members_map.nodes[number]
                if members_map.owners.members[number].name == before:
                    return None
                if node is None and self._local_has_room():
                    return LOCAL
                if node is not None and node.is_alive and not node.is_full:
                    return node.member.name
                alive_count += _is_alive(node)
                if alive_count == _MAX_HOLDERS:
                    return None
        return None

    def next_holders(self, keys: list[bytes], answered: frozenset[str]) -> list[RemoteNode | None]:
        """Return the next member to ask for each item; None if no more may have it.

        The caller holds ``lock``.

        Args:
            keys: the items' keys.
            answered: the names of members that do not have these items.
        """
        members_map = self.map
        owners = members_map.first(keys) if members_map.nodes else [0] * len(keys)
        holders: list[RemoteNode | None] = []
        for key, owner in zip(keys, owners, strict=True):
            node = members_map.nodes[owner] if members_map.nodes else None
            if answered or node is None or not node.is_alive:
                node = None if self.is_closed else self._next_holder(key, answered)
            holders.append(node)
        return holders

    def connect(self, node: RemoteNode, newest_ns: int) -> KeeperClient:
        """Connect to a member, and tell it when the newest known member joined.

        Raises LinkError, and SpecRefused if it holds another cache.
        """
        return KeeperClient(node.member.address, self._token, self._spec, newest_ns)

    def mark_lost(self, node: RemoteNode) -> None:
        """Record that a member does not answer."""
        with self.lock:
            if node.is_alive:
                node.mark_lost()
            self.changed.notify_all()  # so that it is tried again when its backoff ends
        self.report()

    def report(self) -> None:
        """Call ``on_change`` with the current numbers."""
        members_map = self.map
        alive_count = sum(map(_is_alive, members_map.nodes))
        self._on_change(len(members_map.nodes), alive_count, members_map.owners.version)

    def _next_holder(self, key: bytes, answered: frozenset[str]) -> RemoteNode | None:
        for node in self._possible_holders(key):
            if node is not None and node.member.name not in answered:
                return node
        return None

    def _possible_holders(self, key: bytes) -> Iterator[RemoteNode | None]:
        """Yield the live members that may hold an item, the likely ones first; None is this host.

        They are the first in the ranking, then those that owned the item before others joined.
        """
        nodes = self.map.nodes
        alive = (n for n in self.map.ranking(key) if _is_alive(nodes[n]))
        first = list(islice(alive, _MAX_HOLDERS))
        for number in first:
            yield nodes[number]
        for number in self.map.past_owners(key):
            if number not in first and _is_alive(nodes[number]):
                yield nodes[number]


def _is_alive(node: RemoteNode | None) -> bool:
    return node is None or node.is_alive
