"""A feed for the jobs of a Ray cluster: its feeder is a named actor, which Ray starts and restarts.

The first job's node gets the actor. If the feeder is killed, Ray restarts it there; if its node is
lost, on another node. It ends with its last job. Outputs go over its socket, or over a link.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
import traceback
from typing import Any, NamedTuple

from stoker.basics.future import start_thread
from stoker.errors import ClusterError, FeedError, StokerError
from stoker.feeds import local_feeds, remote
from stoker.feeds.local_feeds import FeedSettings
from stoker.feeds.server import become_feeder, end_what_is_kept, open_server
from stoker.transport.link import LinkError, LinkRefused, join_address
from stoker.transport.ray_session import (
    ask,
    check_installed,
    end_with_raylet,
    find_or_start,
    require_ray,
)
from stoker.transport.secret import new_token

_FEATURE = 'stoker.feed(cluster="ray")'
_NAMESPACE = "stoker-feeds"
# How long Ray's head may take. It answers in milliseconds, or never if it is gone. Chosen, not
# measured.
_ANSWER_S = 10.0
# How long a feeder may take to start, on another node after its own was lost: Ray notices that
# after some 30 s, and imports from a cold disk take long. Chosen, not measured.
_START_S = 120.0
# How long a feeder that could not start tells the job why; the job then ends it. Chosen, not
# measured.
_REFUSING_S = 30.0
# The wait before a feeder that is just ending or starting is tried again. Chosen, not measured.
_RETRY_S = 0.2


class FeederPlace(NamedTuple):
    """The way to a feeder, or why there is none.

    Attributes:
        node: its node.
        address: its ``host:port``.
        token: the secret of connections to it.
        error: why it did not start; empty if it runs.
    """

    node: str
    address: str
    token: bytes
    error: str = ""


class FeederActor:
    """Runs a feeder as a Ray actor. ``token`` is the secret of connections from other nodes."""

    def __init__(self, settings: FeedSettings, token: bytes) -> None:
        import ray

        end_with_raylet(before_exit=end_what_is_kept)
        become_feeder(settings)
        node = ray.get_runtime_context().get_node_id()
        here = join_address(ray.util.get_node_ip_address(), 0)
        try:
            listener = local_feeds.listen(settings.name)
            if listener is None:
                raise FeedError(f"there is already a feed {settings.name!r} on node {node}")
            feeder = open_server(listener, dataclasses.replace(settings, listen=here), token)
        except (ImportError, StokerError, TypeError, ValueError) as error:
            self._place = FeederPlace(node, "", token, f"{error}")
            start_thread("stoker-feeder", self._end, ray, _REFUSING_S)
            return
        self._place = FeederPlace(node, feeder.address, token)
        start_thread("stoker-feeder", self._serve, ray, feeder)

    def place(self) -> FeederPlace:
        return self._place

    def _serve(self, ray: Any, feeder: Any) -> None:
        """Serve until the last job is gone."""
        try:
            with contextlib.closing(feeder):
                feeder.serve()
        except BaseException:
            traceback.print_exc()
        self._end(ray)

    def _end(self, ray: Any, after_s: float = 0.0) -> None:
        """End this actor for good."""
        time.sleep(after_s)
        end_what_is_kept()
        try:
            ray.kill(ray.get_runtime_context().current_actor)
            time.sleep(_ANSWER_S)
        finally:
            os._exit(1)  # the head did not hear: Ray starts this actor anew, and it asks again


def connect_in_cluster(settings: FeedSettings) -> socket.socket:
    """Connect to the feeder of the cluster; have Ray start it if there is none.

    Raises FeedError; ClusterError if this process has joined no cluster, or if the cluster's head
    does not answer; ImportError if Ray is not installed.
    """
    check_installed(_FEATURE)
    ray = require_ray(_FEATURE)
    node = ray.get_runtime_context().get_node_id()
    until_s = time.monotonic() + _START_S
    while True:
        actor = _find_feeder(settings)
        place = _ask_for_place(ray, actor, max(0.0, until_s - time.monotonic()))
        try:
            if isinstance(place, str):
                cause = place  # it is just ending, or its node is lost
            elif place.error:
                ray.kill(actor)
                raise FeedError(place.error)
            elif place.node != node:
                return remote.connect(place.address, place.token, insecure=settings.insecure)
            elif (connection := local_feeds.connect(settings.name)) is not None:
                return connection
            else:
                cause = "it does not listen"
        except LinkRefused as error:
            raise FeedError(f"cannot join the feed {settings.name!r}: {error}") from error
        except LinkError as error:
            # An error that is kept would keep this frame and its callers', and so a feed that its
            # job no longer uses.
            cause = str(error)
        if time.monotonic() > until_s:
            raise FeedError(f"the feeder of {settings.name!r} does not start: {cause}")
        time.sleep(_RETRY_S)


def _find_feeder(settings: FeedSettings) -> Any:
    """Return the feed's actor, which may just start. Raises ClusterError after a time limit.

    Ray's client has no time limit, and would wait for ever for a head node that is gone.
    """
    arguments = FeederActor, settings.name, _NAMESPACE, settings, new_token()
    found = ask(lambda: find_or_start(*arguments, may_move=True), _ANSWER_S)
    if isinstance(found, str):
        raise ClusterError(
            f"{_FEATURE}: the head of the Ray cluster does not answer, so the feed cannot be found "
            f"({found})"
        )
    return found


def _ask_for_place(ray: Any, actor: Any, timeout_s: float) -> FeederPlace | str:
    """Return the way to a feeder, or why it does not tell."""
    return ask(
        lambda: FeederPlace(*ray.get(actor.place.remote(), timeout=timeout_s)), timeout_s + _RETRY_S
    )
