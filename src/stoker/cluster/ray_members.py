"""Cluster membership in Ray: the nodes on which a job has opened the cache.

A cache server is a Ray actor: one on each node, for all jobs on that node, now and later. The actor
is detached, so it outlives the job that started it. It ends with its node, with the cluster, or by
``stoker cache end``. If it is killed, Ray restarts it on the same node, in the same folder and at
the same port if that is free. Its items remain if a job still uses the folder.

The cache servers' entries are in Ray's key-value store. An entry is wholly in its key, so one
request lists all cache servers; those on nodes that Ray considers dead are left out. `NodeClient`
notices a cache server that does not answer long before Ray does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.cache import location
from stoker.cache.location import Limit
from stoker.cluster.cache_server import CacheServer
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.membership import Members
from stoker.cluster.owners import Member
from stoker.cluster.torchrun import Started
from stoker.errors import CacheError, StokerError
from stoker.transport.link import join_address, split_address
from stoker.transport.ray_session import (
    ask,
    check_installed,
    end_with_raylet,
    find_or_start,
    require_ray,
)
from stoker.transport.secret import new_token

NAMESPACE = "stoker-caches"


class Registry:
    """The cache servers of one cache, in Ray's key-value store.

    The store lives exactly as long as the cluster, and needs no further process that could be lost.

    Args:
        cache: the cache's name: the digest of its specification.
        ray: the ``ray`` module, in a process that has joined the cluster.
    """

    def __init__(self, cache: str, ray: Any) -> None:
        # Ray has no public interface to it. If a release changes it, only this class changes.
        from ray.experimental import internal_kv

        self._cache = cache
        self._ray = ray
        self._kv = internal_kv

    def token(self) -> bytes:
        """Return the secret of the cluster's caches; the first caller creates it."""
        self._kv._internal_kv_put("token", new_token(), overwrite=False, namespace=NAMESPACE)
        token: bytes = self._kv._internal_kv_get("token", namespace=NAMESPACE)
        return token

    def enter(self, member: Member) -> None:
        """Add a node's cache server; it replaces an earlier entry."""
        self.leave(member.name)
        numbers = str(member.weight_bytes), str(member.joined_ns)
        key = "/".join((self._cache, member.name, *numbers, member.address))
        self._kv._internal_kv_put(key, b"1", namespace=NAMESPACE)

    def leave(self, node: str) -> None:
        """Remove a node's entry."""
        prefix = f"{self._cache}/{node}/"
        self._kv._internal_kv_del(prefix, del_by_prefix=True, namespace=NAMESPACE)

    def members(self) -> tuple[Member, ...]:
        """Return the cache servers on live nodes, sorted by node."""
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        keys = self._kv._internal_kv_list(f"{self._cache}/", namespace=NAMESPACE)
        entries = (key.decode().split("/", 4) for key in keys)
        found = [
            Member(node, address, int(weight_bytes), int(joined_ns))
            for _, node, weight_bytes, joined_ns, address in entries
            if node in alive
        ]
        return tuple(sorted(found, key=lambda member: member.name))


# How long a cache server may take to start: Ray may first start a process and install its
# environment. Chosen, not measured.
_START_S = 120.0
# How long a cache server may take to end: it closes its store, for which its writer has 5 s, and
# Ray answers slowly under load. Chosen, not measured.
_END_S = 30.0
# The first try may find an actor that is just dying; the second then makes a new one. The third is
# a margin.
_ATTEMPTS = 3


class CacheServerActor:
    """Runs a node's cache server as a Ray actor; Ray restarts it if it dies."""

    def __init__(self, cache: str, limit: Limit, folder: str | None, insecure: bool) -> None:
        import ray

        self._insecure = insecure
        self._registry = Registry(cache, ray)
        self._node: str = ray.get_runtime_context().get_node_id()
        self._server: CacheServer | None = None
        try:
            if folder is None:
                name = f"server-{cache}-{self._node[:16]}"
                folder = os.path.join(location.make_memory_folder(), name)
            members = {member.name: member for member in self._registry.members()}
            before = members.get(self._node)
            self._server = server = self._serve(
                ray.util.get_node_ip_address(), before, limit, folder
            )
        except (OSError, ValueError, ImportError, StokerError) as error:
            self._started = Started(error=str(error))
            return
        atexit.register(server.close)
        end_with_raylet(before_exit=server.close)
        self._started = Started(server.address, server.folder, server.limit_bytes)
        newest_ns = max((member.joined_ns for member in members.values()), default=0)
        # Later than all others, whatever this host's clock says.
        joined_ns = before.joined_ns if before else max(time.time_ns(), newest_ns + 1)
        weight_bytes = max(1, server.limit_bytes)
        self._registry.enter(Member(self._node, server.address, weight_bytes, joined_ns))

    def _serve(self, host: str, before: Member | None, limit: Limit, folder: str) -> CacheServer:
        """Serve at the port of the cache server that ran here before, if that is free."""
        token = self._registry.token()
        make = functools.partial(
            CacheServer, token=token, limit=limit, folder=folder, insecure=self._insecure
        )
        if before is not None:
            _, port = split_address(before.address)
            with contextlib.suppress(OSError):  # another process has the port now
                return make(join_address(host, port))
        return make(join_address(host, 0))

    def started(self) -> Started:
        """Return the cache server's address and store, or its error."""
        return self._started

    def close(self) -> None:
        """Leave the registry and close the store, for good."""
        self._registry.leave(self._node)
        if self._server is not None:
            self._server.close()


def start_server(
    ray: Any, cache: str, limit: Limit, folder: str | None, *, insecure: bool = False
) -> Started:
    """Return the address and store of this node's cache server; start one if there is none.

    Args:
        ray: the ``ray`` module, in a process that has joined the cluster.
        cache: the cache's name.
        limit, folder: the size and folder of a new store.
        insecure: whether a new cache server leaves its connections unencrypted.

    Raises CacheError if the cache server does not start.
    """
    name = f"{cache}-{ray.get_runtime_context().get_node_id()}"

    def start() -> tuple[Any, Started]:
        actor = find_or_start(CacheServerActor, name, NAMESPACE, cache, limit, folder, insecure)
        return actor, ray.get(actor.started.remote(), timeout=_START_S)

    cause = ""
    for _ in range(_ATTEMPTS):
        answer = ask(start, 2 * _START_S)  # as a new actor may wait for its node, too
        if isinstance(answer, str):
            cause = answer
            # The actor may be dying; Ray frees its name a moment later.
            time.sleep(1.0)
            continue
        actor, started = answer
        if started.error:
            ray.kill(actor)
            raise CacheError(f"the cache server of this node did not start: {started.error}")
        return started
    raise CacheError(f"the cache server of this node does not answer: {cause}")


def end_all() -> int:
    """End the cache servers of all caches in this host's Ray cluster; return how many.

    Raises CacheError if this host belongs to no cluster, ImportError if Ray is not installed.
    """
    check_installed("stoker cache end")
    import ray

    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        raise CacheError(f"this host belongs to no running Ray cluster ({error})") from error
    try:
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
        for name in names:
            try:
                actor = ray.get_actor(name, NAMESPACE)
                with contextlib.suppress(ray.exceptions.GetTimeoutError):  # it may be frozen
                    ray.get(actor.close.remote(), timeout=_END_S)
                ray.kill(actor)
            except (ValueError, ray.exceptions.RayError):  # it has ended meanwhile
                continue
        return len(names)
    finally:
        ray.shutdown()


_FEATURE = '.cache(cluster="ray")'
# How often the nodes are listed, besides when one is known to be new: each list is a request to
# Ray's head node. Chosen, not measured.
_LIST_EVERY_S = 2.0


class RayHosts:
    """The cache servers of a cache in the Ray cluster that this process has joined.

    A process that has not joined the cluster, such as a worker process, keeps the members that it
    got at its start. A Ray actor has joined it, and uses the store of its own node.

    Raises CacheError if this node's cache server does not start.
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
        """Start this node's cache server if there is none, and use its store."""
        started = start_server(ray, self._cache, self._limit, self._path, insecure=self.insecure)
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
    """Start this node's cache server if there is none, and find the others.

    With ``insecure``, connections are not encrypted, and neither are those of a cache server that
    this call starts.

    Raises ClusterError if this process has joined no Ray cluster, CacheError if the cache server
    does not start.
    """
    ray, cache = require_ray(_FEATURE), spec.digest().hex()
    return RayHosts(ray, cache, limit, path, insecure=insecure)
