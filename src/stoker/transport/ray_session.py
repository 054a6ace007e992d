"""The Ray cluster that this process has joined, for caches, workers and feeds."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from stoker.basics.process import OwningProcess, end_with
from stoker.errors import ClusterError
from stoker.transport.secret import new_token

_owner = OwningProcess()


def check_installed(feature: str) -> None:
    """Raise ImportError if Ray is not installed; ``feature`` names what needs it."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"{feature} needs Ray: pip install 'stoker[ray]'")


def require_ray(feature: str) -> Any:
    """Return the ``ray`` module, connected to the cluster that this process has joined.

    Raises ClusterError if the process has joined no cluster, or was forked from one that has;
    the message names ``feature``.
    """
    import ray

    if not _owner.is_current:
        raise ClusterError(
            f"{feature} cannot be used in a forked process: the connection to Ray belongs to its "
            "parent. Iterate in the parent"
        )
    if not ray.is_initialized():
        raise ClusterError(
            f"{feature} needs a Ray cluster, but this process has joined none. Call "
            'ray.init(address="auto") first, or ray.init(address="local") for a cluster of this '
            "host alone"
        )
    return ray


def end_with_raylet(before_exit: Callable[[], object] | None = None) -> None:
    """End this actor's process when its raylet is gone; ``before_exit`` is called first.

    Ray lets an actor outlive its raylet; the actor would then hold resources that nobody counts.
    """
    end_with(os.getppid(), by_main_thread=False, before_exit=before_exit)


class RayStore:
    """A namespace in Ray's key-value store, through which processes of a cluster share values.

    The store lives exactly as long as the cluster, and needs no further process that could be lost.

    Args:
        ray: the ``ray`` module, in a process that has joined the cluster.
        namespace: the namespace of the keys.
    """

    def __init__(self, ray: Any, namespace: str) -> None:
        # Ray has no public interface to it. If a release changes it, only this class changes.
        from ray.experimental import internal_kv

        self._ray = ray
        self._kv = internal_kv
        self._space = {"namespace": namespace}

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """Set a key; without ``overwrite`` only if it is not set. Returns whether it was set."""
        was_there = self._kv._internal_kv_put(key, value, overwrite=overwrite, **self._space)
        return overwrite or not was_there

    def get(self, key: str) -> bytes | None:
        """Return a key's value, None if it is not set."""
        value: bytes | None = self._kv._internal_kv_get(key, **self._space)
        return value

    def keys(self, prefix: str) -> list[str]:
        return [key.decode() for key in self._kv._internal_kv_list(prefix, **self._space)]

    def remove(self, key: str) -> None:
        self._kv._internal_kv_del(key, **self._space)

    def remove_all(self, prefix: str) -> None:
        self._kv._internal_kv_del(prefix, del_by_prefix=True, **self._space)

    def token(self) -> bytes:
        """Return the secret of the namespace; the first caller creates it."""
        self.put("token", new_token(), overwrite=False)
        token = self.get("token")
        assert token is not None
        return token

    def nodes(self) -> set[str]:
        """Return the names of the nodes that Ray considers alive."""
        return {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}

    def node(self) -> str:
        """Return the name of this process's node."""
        name: str = self._ray.get_runtime_context().get_node_id()
        return name
