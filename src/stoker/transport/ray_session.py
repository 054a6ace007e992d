"""The Ray cluster that this process has joined."""

from __future__ import annotations

import importlib.util
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.errors import ClusterError

_owner = OwningProcess()


def check_installed(feature: str) -> None:
    """Raise ImportError if Ray is not installed; ``feature`` names what needs it."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"{feature} needs Ray: pip install 'stoker[ray]'")


def joined_ray(feature: str) -> Any:
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
