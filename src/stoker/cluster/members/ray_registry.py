"""The registry of a Ray cluster's keepers, in Ray's key-value store.

A keeper's whole entry is in its key, so one request lists all keepers. The list leaves out keepers
on nodes that Ray considers dead.
"""

from __future__ import annotations

from typing import Any

from stoker.cluster.owners import Member
from stoker.transport.ray_session import RayStore

NAMESPACE = "stoker-caches"


class Registry:
    """The keepers of one cache.

    Args:
        cache: the cache's name: the digest of its specification.
        ray: the ``ray`` module, in a process that has joined the cluster.
    """

    def __init__(self, cache: str, ray: Any) -> None:
        self._cache = cache
        self._store = RayStore(ray, NAMESPACE)

    def token(self) -> bytes:
        """Return the secret of the cluster's caches."""
        return self._store.token()

    def enter(self, member: Member) -> None:
        """Add a node's keeper; it replaces an earlier entry."""
        self.leave(member.name)
        numbers = str(member.weight_bytes), str(member.joined_ns)
        key = "/".join((self._cache, member.name, *numbers, member.address))
        self._store.put(key, b"1")

    def leave(self, node: str) -> None:
        """Remove a node's entry."""
        self._store.remove_all(f"{self._cache}/{node}/")

    def members(self) -> tuple[Member, ...]:
        """Return the keepers on live nodes, sorted by node."""
        alive = self._store.nodes()
        entries = (key.split("/", 4) for key in self._store.keys(f"{self._cache}/"))
        found = [
            Member(node, address, int(weight_bytes), int(joined_ns))
            for _, node, weight_bytes, joined_ns, address in entries
            if node in alive
        ]
        return tuple(sorted(found, key=lambda member: member.name))
