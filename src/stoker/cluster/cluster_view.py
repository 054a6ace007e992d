"""One process's view of the other members: the map, which ones answer, which have room.

An item belongs to the first live member in its ranking (``owners``). A process that misses an item
asks that member and the next, and no others; an item that neither has is read from storage, and put
into the first of them that has room. So a lost member costs one more read of each of its items, and
a new or returning member gets items that other processes still find at the member behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.keeper.client import KeeperClient
from stoker.cluster.remote_node import MemberMap, RemoteNode
from stoker.schedule.owners import OwnerMap

# Members that are asked for an item, or brought it: its owner, and the next, who had it before the
# map changed.
_IN_TURN = 2

HOME = "home"
"""Stands for a member: this host's own store."""


class ClusterView:
    """The other members of a cluster, for one process.

    Args:
        token: the cluster's secret.
        definition: what this process caches.
        home_has_room: whether this host's store has room.
        on_change: called with the number of members, the number that answer, and the map's version.

    Attributes:
        lock: guards all knowledge of members and all queues for them. No code under it waits for
            another node.
        changed: a condition over it: there is work.
        is_closed: whether all work has ended.
        view: the map, and the connections to its members.
    """

    def __init__(
        self,
        token: bytes,
        definition: CacheSpec,
        home_has_room: Callable[[], bool],
        on_change: Callable[[int, int, int], None],
    ) -> None:
        self._token = token
        self._definition = definition
        self._home_has_room = home_has_room
        self._on_change = on_change
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.is_closed = False
        self.view = MemberMap(OwnerMap.of((), 0), [])

    @property
    def all(self) -> list[RemoteNode]:
        """The members on other hosts."""
        return [peer for peer in self.view.peers if peer is not None]

    @property
    def have_room(self) -> bool:
        """Whether any of them, or this host's store, has room."""
        return self._home_has_room() or any(peer.is_alive and not peer.is_full for peer in self.all)

    def place(self, key: bytes, before: str | None = None) -> str | None:
        """Return the member that should store an item: its name, ``HOME``, or None for none.

        With ``before``, only members that rank before that one.
        """
        with self.lock:
            view, alive = self.view, 0
            if view.peers and view.first(key) == before:
                return None
            for number in view.ranked(key):
                peer = view.peers[number]
                if view.owners.members[number].name == before:
                    return None
                if peer is None and self._home_has_room():
                    return HOME
                if peer is not None and peer.is_alive and not peer.is_full:
                    return peer.member.name
                alive += peer is None or peer.is_alive
                if alive == _IN_TURN:
                    return None
        return None

    def whom_to_ask(self, keys: list[bytes], answered: frozenset[str]) -> list[RemoteNode | None]:
        """Return the next member that may have each item; None for none. With ``lock`` held.

        Args:
            answered: the members that do not have them.
        """
        view = self.view
        owners = view.owners.owners(_places(keys)).tolist() if len(view.owners) else [0] * len(keys)
        found: list[RemoteNode | None] = []
        for key, owner in zip(keys, owners, strict=True):
            peer = view.peers[owner] if view.peers else None
            if answered or peer is None or not peer.is_alive:
                peer = None if self.is_closed else self._next(key, answered)
            found.append(peer)
        return found

    def connect(self, peer: RemoteNode) -> KeeperClient:
        """Connect to a member. Raises LinkError, DefinitionRefused."""
        return KeeperClient(
            peer.member.address, self._token, self._definition, self.view.owners.version
        )

    def lose(self, peer: RemoteNode) -> None:
        """Note that a member does not answer."""
        with self.lock:
            if peer.is_alive:
                peer.lost()
            self.changed.notify_all()  # it is tried again in time
        self.tell()

    def tell(self) -> None:
        """Report the numbers of members and of members that answer."""
        view = self.view
        alive = sum(peer is None or peer.is_alive for peer in view.peers)
        self._on_change(len(view.peers), alive, view.owners.version)

    def _next(self, key: bytes, answered: frozenset[str]) -> RemoteNode | None:
        view, turn = self.view, 0
        for number in view.ranked(key):
            peer = view.peers[number]
            if peer is not None and not peer.is_alive:
                continue
            if peer is not None and peer.member.name not in answered:
                return peer
            turn += 1
            if turn == _IN_TURN:
                return None
        return None


def _places(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(keys), ">u8")[::2].astype(np.uint64)
