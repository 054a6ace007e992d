"""A keeper in a Ray actor: one on each node, for all jobs there, present and later.

The actor is detached, so it outlives the job that started it. It ends with its node, with the
cluster, or by ``stoker cache end``. If it is killed, Ray starts it again on the same node: in the
same folder, whose items remain if a job still uses it, and at the same port, if that is free.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from typing import Any

from stoker.cache import location
from stoker.cache.location import Limit
from stoker.cluster.keeper.server import Keeper
from stoker.cluster.members.ray_registry import NAMESPACE, Registry
from stoker.cluster.members.torchrun import Started
from stoker.errors import CacheError, StokerError
from stoker.schedule.owners import Member
from stoker.transport.link import joined_address, split_address
from stoker.transport.ray_session import check_installed, end_with_raylet

# Ray may first have to start a process and install its environment on the node.
_START_S = 120.0
# A keeper closes a store, for which its writer has 5 s; Ray's own answers take longer.
_END_S = 30.0
# An actor of that name may just be dying: then the second try makes a new one.
_ATTEMPTS = 3


class KeeperActor:
    """Keeps a node's share of a cache; Ray runs it as an actor, and restarts it if it dies."""

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
            self._keeper = keeper = self._serve(ray.util.get_node_ip_address(), limit, folder)
        except (OSError, ValueError, ImportError, StokerError) as error:
            self._place = Started(error=str(error))
            return
        atexit.register(keeper.close)
        end_with_raylet(first=keeper.close)
        self._place = Started(keeper.address, keeper.folder, keeper.limit_bytes)
        self._registry.enter(Member(self._node, keeper.address, max(1, keeper.limit_bytes)))

    def _serve(self, host: str, limit: Limit, folder: str) -> Keeper:
        token = self._registry.token()
        make = functools.partial(
            Keeper, token=token, limit=limit, folder=folder, insecure=self._insecure
        )
        for member in self._registry.members():
            _, port = split_address(member.address)
            if member.name == self._node:
                try:
                    return make(joined_address(host, port))
                except OSError:  # the port is another's now
                    break
        return make(joined_address(host, 0))

    def place(self) -> Started:
        """Return its address and store, or why it failed."""
        return self._place

    def close(self) -> None:
        """Leave the store, for good."""
        self._registry.leave(self._node)
        if self._keeper is not None:
            self._keeper.close()


def keep_here(
    ray: Any, cache: str, limit: Limit, folder: str | None, *, insecure: bool = False
) -> Started:
    """Return the address and store of this node's keeper; start one if there is none.

    Args:
        ray: the ``ray`` module, in a process that has joined the cluster.
        cache: the cache's name.
        limit, folder: the size and folder of a new store.
        insecure: whether a newly started keeper leaves its connections unencrypted.

    Raises CacheError where the keeper does not start.
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
            place: Started = ray.get(actor.place.remote(), timeout=_START_S)
        except ray.exceptions.RayError as error:  # it may just be dying
            cause = error
            # A dying actor gives its name up a moment later.
            time.sleep(1.0)
            continue
        if place.error:
            ray.kill(actor)
            raise CacheError(f"the keeper of this node did not start: {place.error}")
        return place
    raise CacheError(f"the keeper of this node does not answer: {cause}") from cause


def end_all() -> int:
    """End the keepers of all caches in the cluster that this host belongs to; return how many.

    Raises CacheError where this host belongs to no cluster, ImportError without Ray.
    """
    check_installed("stoker cache end")
    import ray

    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        raise CacheError(f"this host belongs to no Ray cluster that runs ({error})") from error
    try:
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
        for name in names:
            try:
                actor = ray.get_actor(name, NAMESPACE)
                ray.get(actor.close.remote(), timeout=_END_S)
                ray.kill(actor)
            except (ValueError, ray.exceptions.RayError):  # it has ended by itself
                continue
        return len(names)
    finally:
        ray.shutdown()
