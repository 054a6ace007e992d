"""The registry of a Ray cluster's keepers, in Ray's key-value store.

The store lives exactly as long as the cluster, and needs no further process that could be lost. A
keeper's whole entry is in its key, so one request lists all keepers. The list leaves out keepers on
nodes that Ray considers dead.
"""

from __future__ import annotations

from typing import Any

from stoker.schedule.owners import Member
from stoker.transport.token import new_token

NAMESPACE = "stoker-caches"
_TOKEN = "token"


class Registry:
    """The keepers of one cache.

    Args:
        cache: the cache's name: the digest of its specification.
        ray: the ``ray`` module, in a process that has joined the cluster.
    """

    def __init__(self, cache: str, ray: Any) -> None:
        from ray.experimental import internal_kv

        self._cache = cache
        self._ray = ray
        self._store = internal_kv

    def token(self) -> bytes:
        """Return the secret of the cluster's caches; the first caller creates it."""
        self._store._internal_kv_put(_TOKEN, new_token(), overwrite=False, namespace=NAMESPACE)
        token: bytes = self._store._internal_kv_get(_TOKEN, namespace=NAMESPACE)
        return token

    def enter(self, member: Member) -> None:
        """Add a node's keeper; it replaces an earlier entry."""
        self.leave(member.name)
        key = "/".join((self._cache, member.name, str(member.weight_bytes), member.address))
        self._store._internal_kv_put(key, b"1", namespace=NAMESPACE)

    def leave(self, node: str) -> None:
        """Remove a node's entry."""
        self._store._internal_kv_del(
            f"{self._cache}/{node}/", del_by_prefix=True, namespace=NAMESPACE
        )

    def members(self) -> tuple[Member, ...]:
        """Return the keepers on live nodes, sorted by node."""
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        found = []
        for key in self._store._internal_kv_list(f"{self._cache}/", namespace=NAMESPACE):
            _, node, weight_bytes, address = key.decode().split("/", 3)
            if node in alive:
                found.append(Member(node, address, int(weight_bytes)))
        return tuple(sorted(found, key=lambda member: member.name))
