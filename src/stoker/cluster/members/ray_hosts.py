"""Cluster membership in Ray: the nodes on which a job has opened the cache.

Ray says which nodes there are. Whether their keepers answer is found out by those who ask
(``node_client``), long before Ray notices.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.cache.location import Limit
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.members.membership import Members
from stoker.cluster.members.ray_keeper import keep_here
from stoker.cluster.members.ray_registry import Registry
from stoker.transport.ray_session import check_installed, joined_ray

_WHAT = '.cache(cluster="ray")'
# A node that joins is used a moment later; each look asks Ray's head node.
_LOOK_EVERY_S = 2.0


class RayHosts:
    """The keepers of a cache in the Ray cluster that this process has joined.

    Processes that have not joined it themselves, such as worker processes, know the members from
    the time of their start. Actors of Ray have joined it: an actor uses the store of its own node.

    Raises CacheError where this node's keeper does not start.
    """

    def __init__(
        self, ray: Any, cache: str, limit: Limit, path: str | None, *, insecure: bool
    ) -> None:
        self._cache = cache
        self._limit = limit
        self._path = path
        self._insecure = insecure
        self._members = Members(0, ())
        self.token = Registry(cache, ray).token()
        self._settle(ray)

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_owner", "_looked_s")
        return {name: value for name, value in vars(self).items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner = OwningProcess()
        self._looked_s = 0.0
        ray = self._joined()
        if ray is not None and ray.get_runtime_context().get_node_id() != self.home:
            self._settle(ray)

    def _settle(self, ray: Any) -> None:
        """Use the store of this node."""
        place = keep_here(ray, self._cache, self._limit, self._path, insecure=self._insecure)
        self.home: str | None = ray.get_runtime_context().get_node_id()
        self.folder: str | None = place.folder
        self._owner = OwningProcess()
        self._looked_s = 0.0

    def _joined(self) -> Any:
        """Return the ``ray`` module if this process has joined a cluster, else None."""
        ray = sys.modules.get("ray")
        is_joined = ray is not None and self._owner.is_current and ray.is_initialized()
        return ray if is_joined else None

    def members(self) -> Members:
        ray = self._joined()
        if ray is not None and time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            try:
                found = Registry(self._cache, ray).members()
            except Exception:  # Ray's of many kinds, while its head is not there: they stay
                found = self._members.members
            if found != self._members.members:
                self._members = Members(self._members.version + 1, found)
            self._looked_s = time.monotonic()
        return self._members


def check() -> None:
    """Raise ImportError without Ray."""
    check_installed(_WHAT)


def join(
    definition: CacheSpec, limit: Limit, path: str | None, *, insecure: bool = False
) -> RayHosts:
    """Start this node's keeper, if there is none, and find the others.

    With ``insecure`` connections to it are not encrypted.

    Raises ClusterError where this process has joined no Ray cluster, CacheError where the keeper
    does not start.
    """
    ray, cache = joined_ray(_WHAT), definition.digest().hex()
    return RayHosts(ray, cache, limit, path, insecure=insecure)
