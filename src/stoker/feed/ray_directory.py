"""The directory of feeds in a Ray cluster: each feed's node, in Ray's key-value store.

A node claims a feed under a number, and only one node can write the next number. So if several
nodes find a feed lost, only one of them starts it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from stoker.basics.future import OneShot, start_thread
from stoker.errors import ClusterError
from stoker.transport.ray_session import RayStore, check_installed, require_ray

_FEATURE = 'stoker.share(cluster="ray")'
_NAMESPACE = "stoker-feeds"
# How long Ray's head may take. It answers in milliseconds, or never if it is gone. Chosen, not
# measured.
_ANSWER_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class FeedLocation:
    """The location of a feed.

    Attributes:
        token: the secret that the cluster's feeds share.
        claim: the number of the claim.
        is_here: whether the feed is on this node, or must be started on it.
        address: ``host:port``; empty while it is unknown.
    """

    token: bytes
    claim: int
    is_here: bool
    address: str


class _Claim(msgspec.Struct):
    """A feed's entry under the number of a claim."""

    node: str
    address: str


class Directory:
    """The shared feeds of the Ray cluster that this process has joined.

    Raises ClusterError if the process has joined no cluster, or if the cluster's head does not
    answer; ImportError if Ray is not installed.

    Attributes:
        host: this node's address on the cluster's network.
    """

    def __init__(self) -> None:
        check_installed(_FEATURE)
        ray = require_ray(_FEATURE)
        self._store = RayStore(ray, _NAMESPACE)
        self._node = self._store.node()
        self.host: str = ray.util.get_node_ip_address()

    def find(self, name: str, lost_claim: int) -> FeedLocation:
        """Return a feed's location. If it has none, or has that of ``lost_claim``, claim it for
        this node."""
        return _with_timeout(lambda: self._find(name, lost_claim))

    def publish(self, name: str, address: str) -> None:
        """Publish the address of a feed on this node."""
        _with_timeout(lambda: self._publish(name, address))

    def _publish(self, name: str, address: str) -> None:
        number, claim = self._latest(name)
        if claim is None or claim.node != self._node:
            number += 1  # another node has claimed it meanwhile, but the feed is here
        self._put(_key(name, number), address, overwrite=True)

    def _find(self, name: str, lost_claim: int) -> FeedLocation:
        while True:
            number, claim = self._latest(name)
            is_here = claim is not None and claim.node == self._node
            if claim is not None and (
                is_here or (number != lost_claim and claim.node in self._store.nodes())
            ):
                return FeedLocation(self._store.token(), number, is_here, claim.address)
            if self._put(_key(name, number + 1), "", overwrite=False):  # else another was faster
                self._store.remove(_key(name, number))
                return FeedLocation(self._store.token(), number + 1, True, "")

    def _latest(self, name: str) -> tuple[int, _Claim | None]:
        keys = self._store.keys(f"{name}/")
        number = max((int(key.rpartition("/")[2]) for key in keys), default=0)
        data = self._store.get(_key(name, number))
        return number, None if data is None else msgspec.msgpack.decode(data, type=_Claim)

    def _put(self, key: str, address: str, *, overwrite: bool) -> bool:
        """Write a claim of this node; True if it was written."""
        claim = msgspec.msgpack.encode(_Claim(self._node, address))
        return self._store.put(key, claim, overwrite=overwrite)


def _with_timeout(call: Callable[[], T]) -> T:
    """Return the result of a call to Ray. Raises ClusterError after a time limit.

    Ray's client has no time limit, and would wait for ever for a head node that is gone.
    """
    answer: OneShot[T] = OneShot()

    def run() -> None:
        try:
            answer.give(call())
        except BaseException as error:
            answer.give(error=error)

    # A thread of its own: it may never end.
    start_thread("stoker-feed-directory", run)
    try:
        return answer.wait(_ANSWER_S)
    except Exception as error:  # Ray raises many types
        raise ClusterError(
            f"{_FEATURE}: the head of the Ray cluster does not answer, so the feed cannot be found "
            f"({str(error) or f'no answer within {_ANSWER_S:.0f} s'})"
        ) from error


def _key(name: str, number: int) -> str:
    return f"{name}/{number}"
