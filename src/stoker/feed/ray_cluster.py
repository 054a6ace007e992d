"""Feeds for the jobs of a Ray cluster: one feeder in the cluster, found from every node.

Each feed's node is in Ray's key-value store. A node claims a feed under a number, and only one node
can write the next number. So if several nodes find a feed lost, only one of them starts it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from stoker.basics.future import OneShot, start_thread
from stoker.errors import ClusterError
from stoker.feed.autostart import connect_or_start
from stoker.feed.connection import FeedAddress
from stoker.feed.messages import Welcome
from stoker.feed.remote import connect
from stoker.feed.settings import FeedSettings
from stoker.transport.address import join_address
from stoker.transport.link import LinkError
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


# How often to look for the feed: a feeder takes seconds to start, and each look is a call of Ray.
# Chosen, not measured.
_POLL_S = 0.2
# How long a node may take to start a feeder before another node may start one: imports from a cold
# disk take long. Chosen, not measured.
_CLAIM_S = 60.0
# How long a node may take to restart a killed feeder: its modules are in memory by then. Chosen,
# not measured.
_RESTART_S = 5.0


def cluster_address(settings: FeedSettings, max_losses: int) -> FeedAddress:
    """Return the address of the feed that all jobs of a Ray cluster share."""
    finder = ClusterFeedFinder(settings)
    return FeedAddress(
        settings.name,
        finder.connect,
        settings.target,
        max_losses,
        on_welcome=finder.on_welcome,
    )


class ClusterFeedFinder:
    """Finds a feed on any node of the Ray cluster, or starts it on this node."""

    def __init__(self, settings: FeedSettings) -> None:
        self._settings = settings
        self._is_here = False
        self._has_connected = False

    def connect(self) -> socket.socket:
        """Connect to the feeder, wherever it is; start it if it belongs on this node.

        Raises FeedError; ClusterError if this process has joined no cluster; ImportError if Ray is
        not installed.
        """
        directory = Directory()  # made here: a forked child needs its own
        since_s, claim, lost_claim = time.monotonic(), 0, 0
        while True:
            location = directory.find(self._settings.name, lost_claim)
            self._is_here = location.is_here
            if location.is_here:
                listen = location.address or join_address(directory.host, 0)
                settings = dataclasses.replace(self._settings, listen=listen)
                return connect_or_start(settings, location.token)
            if location.address:
                with contextlib.suppress(LinkError):
                    return connect(
                        location.address, location.token, insecure=self._settings.insecure
                    )
            if claim != location.claim:
                since_s, claim = time.monotonic(), location.claim
            if time.monotonic() - since_s >= self._patience_s(location):
                lost_claim = claim
            else:
                time.sleep(_POLL_S)

    def on_welcome(self, welcome: Welcome) -> None:
        """Publish the address of the feeder for the other jobs, if it is on this node."""
        self._has_connected = True
        if self._is_here and welcome.address:
            Directory().publish(self._settings.name, welcome.address)

    def _patience_s(self, location: FeedLocation) -> float:
        """Return how many seconds to wait for a feed that does not answer."""
        if not location.address:
            return _CLAIM_S
        return (
            _RESTART_S if self._has_connected else 0.0
        )  # the entry may be old: the feed may have ended long ago
