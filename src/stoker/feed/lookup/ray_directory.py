"""The directory of feeds in a Ray cluster: each feed's node, in Ray's key-value store.

The store lives exactly as long as the cluster, and needs no further process that could be lost. A
node claims a feed under a number, and only one node can write the next number. So if several nodes
find a feed lost, only one of them starts it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from stoker.basics.future import OneShot
from stoker.errors import ClusterError
from stoker.transport.ray_session import check_installed, joined_ray
from stoker.transport.token import new_token

_FEATURE = 'stoker.share(cluster="ray")'
_NAMESPACE = "stoker-feeds"
_TOKEN = "token"  # claims have a number in their keys, so this cannot be one
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
        self._ray: Any = joined_ray(_FEATURE)
        from ray.experimental import internal_kv

        self._store = internal_kv
        self._node: str = self._ray.get_runtime_context().get_node_id()
        self.host: str = self._ray.util.get_node_ip_address()

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
        self._put(_key(name, number), _Claim(self._node, address), overwrite=True)

    def _find(self, name: str, lost_claim: int) -> FeedLocation:
        while True:
            number, claim = self._latest(name)
            is_here = claim is not None and claim.node == self._node
            if claim is not None and (
                is_here or (number != lost_claim and self._is_alive(claim.node))
            ):
                return FeedLocation(self._token(), number, is_here, claim.address)
            if self._enter(name, number + 1):
                self._store._internal_kv_del(_key(name, number), namespace=_NAMESPACE)
                return FeedLocation(self._token(), number + 1, True, "")

    def _latest(self, name: str) -> tuple[int, _Claim | None]:
        keys = self._store._internal_kv_list(f"{name}/", namespace=_NAMESPACE)
        number = max((int(key.rpartition(b"/")[2]) for key in keys), default=0)
        data = self._store._internal_kv_get(_key(name, number), namespace=_NAMESPACE)
        return number, None if data is None else msgspec.msgpack.decode(data, type=_Claim)

    def _enter(self, name: str, number: int) -> bool:
        """Claim a feed; False if another node was faster."""
        return self._put(_key(name, number), _Claim(self._node, ""), overwrite=False)

    def _put(self, key: str, claim: _Claim, *, overwrite: bool) -> bool:
        data = msgspec.msgpack.encode(claim)
        return not self._store._internal_kv_put(
            key, data, overwrite=overwrite, namespace=_NAMESPACE
        )

    def _is_alive(self, node: str) -> bool:
        return any(each["NodeID"] == node and each["Alive"] for each in self._ray.nodes())

    def _token(self) -> bytes:
        """Return the secret of the cluster's feeds; the first caller creates it."""
        self._store._internal_kv_put(_TOKEN, new_token(), overwrite=False, namespace=_NAMESPACE)
        token: bytes = self._store._internal_kv_get(_TOKEN, namespace=_NAMESPACE)
        return token


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
    threading.Thread(target=run, name="stoker-feed-directory", daemon=True).start()
    try:
        return answer.wait(_ANSWER_S)
    except Exception as error:  # Ray raises many types
        raise ClusterError(
            f"{_FEATURE}: the head of the Ray cluster does not answer, so the feed cannot be found "
            f"({str(error) or f'no answer within {_ANSWER_S:.0f} s'})"
        ) from error


def _key(name: str, number: int) -> str:
    return f"{name}/{number}"
