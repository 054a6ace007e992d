"""Directory of shared feeds in a Ray cluster: each feed's node, in Ray's key-value store.

Each claim of a feed has a number, and only one node can enter the next number: when several nodes
find a feed lost, only one starts it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from stoker.basics.future import OneShot
from stoker.errors import ClusterError
from stoker.transport.ray_session import RayStore, check_installed, joined_ray

_WHAT = 'stoker.share(cluster="ray")'
_NAMESPACE = "stoker-feeds"
# Ray's head node answers in milliseconds: one that is gone would be waited for without end.
_ANSWER_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class FeedPlace:
    """The location of a feed.

    Attributes:
        token: the secret that the cluster's feeds share.
        claim: the number of the claim.
        is_here: whether this node has the feed, or must start it.
        address: ``host:port``; empty while it is not known.
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

    Raises ClusterError if the process has joined no cluster or the cluster's head does not answer,
    ImportError without Ray.

    Attributes:
        host: this node's address on the cluster's network.
    """

    def __init__(self) -> None:
        check_installed(_WHAT)
        ray = joined_ray(_WHAT)
        self._store = RayStore(ray, _NAMESPACE)
        self._node = self._store.node()
        self.host: str = ray.util.get_node_ip_address()

    def find(self, name: str, lost: int) -> FeedPlace:
        """Return a feed's location; this node claims it if it has none, or if claim ``lost`` is
        gone."""
        return _answered(lambda: self._find(name, lost))

    def tell(self, name: str, address: str) -> None:
        """Publish the address of a feed on this node."""
        _answered(lambda: self._tell(name, address))

    def _tell(self, name: str, address: str) -> None:
        number, claim = self._latest(name)
        if claim is None or claim.node != self._node:
            number += 1  # it was given up in between, and is there after all
        self._put(_key(name, number), address, overwrite=True)

    def _find(self, name: str, lost: int) -> FeedPlace:
        while True:
            number, claim = self._latest(name)
            is_here = claim is not None and claim.node == self._node
            if claim is not None and (
                is_here or (number != lost and claim.node in self._store.nodes())
            ):
                return FeedPlace(self._store.token(), number, is_here, claim.address)
            if self._put(_key(name, number + 1), "", overwrite=False):  # else another was faster
                self._store.remove(_key(name, number))
                return FeedPlace(self._store.token(), number + 1, True, "")

    def _latest(self, name: str) -> tuple[int, _Claim | None]:
        keys = self._store.keys(f"{name}/")
        number = max((int(key.rpartition("/")[2]) for key in keys), default=0)
        data = self._store.get(_key(name, number))
        return number, None if data is None else msgspec.msgpack.decode(data, type=_Claim)

    def _put(self, key: str, address: str, *, overwrite: bool) -> bool:
        """Set a claim of this node; returns whether it was set."""
        claim = msgspec.msgpack.encode(_Claim(self._node, address))
        return self._store.put(key, claim, overwrite=overwrite)


def _answered(call: Callable[[], T]) -> T:
    """Return the result of a call to Ray, with a time limit: it could block for ever.

    Raises ClusterError.
    """
    answer: OneShot[T] = OneShot()

    def ask() -> None:
        try:
            answer.give(call())
        except BaseException as error:
            answer.give(error=error)

    # In a thread: Ray's client has no time-out, and a head node that is gone would be waited for.
    threading.Thread(target=ask, name="stoker-feed-directory", daemon=True).start()
    try:
        return answer.wait(_ANSWER_S)
    except Exception as error:  # Ray's are of many kinds
        raise ClusterError(
            f"{_WHAT}: the head of the Ray cluster does not answer, so the feed cannot be found "
            f"({str(error) or f'within {_ANSWER_S:.0f} s'})"
        ) from error


def _key(name: str, number: int) -> str:
    return f"{name}/{number}"
