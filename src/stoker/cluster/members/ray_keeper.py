"""A keeper in a Ray actor: one on each node, for all jobs on that node, now and later.

The actor is detached, so it outlives the job that started it. It ends with its node, with the
cluster, or by ``stoker cache end``. If it is killed, Ray restarts it on the same node, in the same
folder and at the same port if that is free. Its items remain if a job still uses the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from typing import Any

from stoker.cache import location
from stoker.cache.location import Limit
from stoker.cluster.keeper.server import Keeper
from stoker.cluster.members.ray_registry import NAMESPACE, Registry
from stoker.cluster.members.torchrun import Started
from stoker.cluster.owners import Member
from stoker.errors import CacheError, StokerError
from stoker.transport.address import join_address, split_address
from stoker.transport.ray_session import check_installed, end_with_raylet

# How long a keeper may take to start: Ray may first start a process and install its environment.
# Chosen, not measured.
_START_S = 120.0
# How long a keeper may take to end: it closes its store, for which its writer has 5 s, and Ray
# answers slowly under load. Chosen, not measured.
_END_S = 30.0
# The first try may find an actor that is just dying; the second then makes a new one. The third is
# a margin.
_ATTEMPTS = 3


class KeeperActor:
    """Runs a node's keeper as a Ray actor; Ray restarts it if it dies."""

    def __init__(self, cache: str, limit: Limit, folder: str | None, insecure: bool) -> None:
        import ray

        self._insecure = insecure
        self._registry = Registry(cache, ray)
        self._node: str = ray.get_runtime_context().get_node_id()
        self._keeper: Keeper | None = None
        try:
            if folder is None:
                name = f"keeper-{cache}-{self._node[:16]}"
                folder = os.path.join(location.make_memory_folder(), name)
            members = {member.name: member for member in self._registry.members()}
            before = members.get(self._node)
            self._keeper = keeper = self._serve(
                ray.util.get_node_ip_address(), before, limit, folder
            )
        except (OSError, ValueError, ImportError, StokerError) as error:
            self._started = Started(error=str(error))
            return
        atexit.register(keeper.close)
        end_with_raylet(before_exit=keeper.close)
        self._started = Started(keeper.address, keeper.folder, keeper.limit_bytes)
        newest_ns = max((member.joined_ns for member in members.values()), default=0)
        # Later than all others, whatever this host's clock says.
        joined_ns = before.joined_ns if before else max(time.time_ns(), newest_ns + 1)
        weight_bytes = max(1, keeper.limit_bytes)
        self._registry.enter(Member(self._node, keeper.address, weight_bytes, joined_ns))

    def _serve(self, host: str, before: Member | None, limit: Limit, folder: str) -> Keeper:
        """Serve at the port of the keeper that ran here before, if that is free."""
        token = self._registry.token()
        make = functools.partial(
            Keeper, token=token, limit=limit, folder=folder, insecure=self._insecure
        )
        if before is not None:
            _, port = split_address(before.address)
            with contextlib.suppress(OSError):  # another process has the port now
                return make(join_address(host, port))
        return make(join_address(host, 0))

    def started(self) -> Started:
        """Return the keeper's address and store, or its error."""
        return self._started

    def close(self) -> None:
        """Leave the registry and close the store, for good."""
        self._registry.leave(self._node)
        if self._keeper is not None:
            self._keeper.close()


def start_keeper(
    ray: Any, cache: str, limit: Limit, folder: str | None, *, insecure: bool = False
) -> Started:
    """Return the address and store of this node's keeper; start one if there is none.

    Args:
        ray: the ``ray`` module, in a process that has joined the cluster.
        cache: the cache's name.
        limit, folder: the size and folder of a new store.
        insecure: whether a new keeper leaves its connections unencrypted.

    Raises CacheError if the keeper does not start.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    make = ray.remote(KeeperActor).options(
        name=f"{cache}-{node}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    cause: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            actor = make.remote(cache, limit, folder, insecure)
            started: Started = ray.get(actor.started.remote(), timeout=_START_S)
        except ray.exceptions.RayError as error:
            cause = error
            # The actor may be dying; Ray frees its name a moment later.
            time.sleep(1.0)
            continue
        if started.error:
            ray.kill(actor)
            raise CacheError(f"the keeper of this node did not start: {started.error}")
        return started
    raise CacheError(f"the keeper of this node does not answer: {cause}") from cause


def end_all() -> int:
    """End the keepers of all caches in this host's Ray cluster; return how many.

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
                ray.get(actor.close.remote(), timeout=_END_S)
                ray.kill(actor)
            except (ValueError, ray.exceptions.RayError):  # it has ended meanwhile
                continue
        return len(names)
    finally:
        ray.shutdown()
