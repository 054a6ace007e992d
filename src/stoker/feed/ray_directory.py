"""Which node of a Ray cluster a shared feed is on: a named actor knows.

It is detached: feeds outlive the jobs that began them, and so must what knows where they are. It
ends with the cluster. Should its node be lost, the next job starts another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from stoker.errors import FeedError
from stoker.net.token import new_token

_NAME = "stoker-feeds"
_NAMESPACE = "stoker"
_CLAIM_S = 60.0  # how long a node may take to start a feeder before another one may
_CALL_S = 30.0
_ATTEMPTS = 3


@dataclass(frozen=True)
class FeedPlace:
    """Where a feed is.

    Attributes:
        token: the secret of the cluster's feeds.
        is_here: whether the node that asked has it, or is to start it.
        address: ``host:port``; empty while it is not known.
    """

    token: bytes
    is_here: bool
    address: str


class Directory:
    """The actor: the nodes of feeds, by name."""

    def __init__(self) -> None:
        self._token = new_token()
        self._feeds: dict[str, tuple[str, str, float]] = {}  # node, address, when it was claimed

    def find(self, name: str, node: str, lost: str) -> FeedPlace:
        """Say where a feed is. One that is nowhere, or was ``lost``, goes to the node that asks."""
        owner, address, since_s = self._feeds.get(name, ("", "", 0.0))
        is_late = not address and time.monotonic() - since_s > _CLAIM_S
        if not owner or is_late or (lost and address == lost and owner != node):
            owner, address = node, ""
            self._feeds[name] = node, "", time.monotonic()
        return FeedPlace(self._token, owner == node, address)

    def tell(self, name: str, node: str, address: str) -> None:
        """Take note where a feed listens."""
        self._feeds[name] = node, address, time.monotonic()


def call(method: str, *arguments: Any) -> Any:
    """Call the directory, and start it where there is none.

    Raises FeedError where it does not answer.
    """
    ray = _ray()
    actor = ray.remote(num_cpus=0)(Directory)
    options = {"name": _NAME, "namespace": _NAMESPACE, "lifetime": "detached"}
    cause: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            directory = actor.options(**options, get_if_exists=True).remote()
            return ray.get(getattr(directory, method).remote(*arguments), timeout=_CALL_S)
        except ray.exceptions.RayError as error:  # its node may just have been lost
            cause = error
            time.sleep(1.0)
    raise FeedError(f"the directory of the cluster's feeds does not answer: {cause}") from cause


def own_node() -> tuple[str, str]:
    """Return this node's id, and its address on the cluster's network.

    Raises FeedError where this is no job of a cluster.
    """
    ray = _ray()
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise FeedError('cluster="ray" needs Ray: pip install "stoker[ray]"') from None
    if not ray.is_initialized():
        raise FeedError('cluster="ray" is for jobs of a Ray cluster: call ray.init() before')
    return ray
