"""The Ray cluster that this process has joined."""

from __future__ import annotations

import importlib.util
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.errors import ClusterError

_here = OwningProcess()


def check_installed(what: str) -> None:
    """Raise ImportError without Ray; ``what`` needs it."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"{what} needs Ray: pip install 'stoker[ray]'")


def joined_ray(what: str) -> Any:
    """Return the ``ray`` module of the cluster that this process has joined, for ``what``.

    Raises ClusterError where the process has joined no cluster, or was forked from one that has.
    """
    import ray

    if not _here.is_current:
        raise ClusterError(
            f"{what}: the connection to Ray belongs to the process that this one was forked from. "
            "Iterate there"
        )
    if not ray.is_initialized():
        raise ClusterError(
            f'{what} uses the cluster that this process has joined: call ray.init(address="auto") '
            'first, or ray.init(address="local") for one of this host'
        )
    return ray
