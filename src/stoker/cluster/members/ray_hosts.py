"""Cluster membership in Ray: the nodes on which a job has opened the cache.

Ray lists the nodes. `NodeClient` notices a keeper that does not answer long before Ray does.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.cache.location import Limit
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.members.membership import Members
from stoker.cluster.members.ray_keeper import start_keeper
from stoker.cluster.members.ray_registry import Registry
from stoker.transport.ray_session import check_installed, require_ray

_FEATURE = '.cache(cluster="ray")'
# How often the nodes are listed, besides when one is known to be new: each list is a request to
# Ray's head node. Chosen, not measured.
_LIST_EVERY_S = 2.0


class RayHosts:
    """The keepers of a cache in the Ray cluster that this process has joined.

    A process that has not joined the cluster, such as a worker process, keeps the members that it
    got at its start. A Ray actor has joined it, and uses the store of its own node.

    Raises CacheError if this node's keeper does not start.
    """

    def __init__(
        self, ray: Any, cache: str, limit: Limit, path: str | None, *, insecure: bool
    ) -> None:
        self._cache = cache
        self._limit = limit
        self._path = path
        self.insecure = insecure
        self._members = Members(0, ())
        self.token = Registry(cache, ray).token()
        self._use_local_store(ray)

    def __getstate__(self) -> dict[str, Any]:
        per_process = ("_owner", "_listed_s")
        return {name: value for name, value in vars(self).items() if name not in per_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner = OwningProcess()
        self._listed_s = 0.0
        ray = self._connected_ray()
        if ray is not None and ray.get_runtime_context().get_node_id() != self.local_member:
            self._use_local_store(ray)

    def _use_local_store(self, ray: Any) -> None:
        """Start this node's keeper if there is none, and use its store."""
        started = start_keeper(ray, self._cache, self._limit, self._path, insecure=self.insecure)
        self.local_member: str | None = ray.get_runtime_context().get_node_id()
        self.folder: str | None = started.folder
        self._owner = OwningProcess()
        self._listed_s = 0.0

    def _connected_ray(self) -> Any:
        """Return the ``ray`` module if this process has joined a cluster, else None."""
        ray = sys.modules.get("ray")
        is_joined = ray is not None and self._owner.is_current and ray.is_initialized()
        return ray if is_joined else None

    def members(self, *, at_once: bool = False) -> Members:
        ray = self._connected_ray()
        is_due = at_once or time.monotonic() - self._listed_s >= _LIST_EVERY_S
        if ray is not None and is_due:
            try:
                members = Registry(self._cache, ray).members()
            except Exception:  # many types while Ray's head is away: keep the last members
                members = self._members.members
            if members != self._members.members:
                self._members = Members(self._members.version + 1, members)
            self._listed_s = time.monotonic()
        return self._members


def check() -> None:
    """Raise ImportError if Ray is not installed."""
    check_installed(_FEATURE)


def join(spec: CacheSpec, limit: Limit, path: str | None, *, insecure: bool = False) -> RayHosts:
    """Start this node's keeper if there is none, and find the others.

    With ``insecure``, connections are not encrypted, and neither are those of a keeper that this
    call starts.

    Raises ClusterError if this process has joined no Ray cluster, CacheError if the keeper does not
    start.
    """
    ray, cache = require_ray(_FEATURE), spec.digest().hex()
    return RayHosts(ray, cache, limit, path, insecure=insecure)
