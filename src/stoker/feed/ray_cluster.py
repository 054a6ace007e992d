"""Feeds for the jobs of a Ray cluster: one feeder in the cluster, found from every node."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time

from stoker.feed.autostart import connect_or_start
from stoker.feed.connection import FeedAddress
from stoker.feed.messages import Welcome
from stoker.feed.ray_directory import Directory, FeedLocation
from stoker.feed.remote import connect
from stoker.feed.settings import FeedSettings
from stoker.transport.address import join_address
from stoker.transport.link import LinkError

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
