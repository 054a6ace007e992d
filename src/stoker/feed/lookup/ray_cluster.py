"""Feeds for the jobs of a Ray cluster: one feeder in the cluster, and relays on the other nodes."""

from __future__ import annotations

import dataclasses
import socket
import time

from stoker.feed.autostart import connect_or_start
from stoker.feed.connection import FeedAddress
from stoker.feed.lookup.ray_directory import Directory, FeedLocation
from stoker.feed.lookup.relay import relay_settings
from stoker.feed.messages import Malformed, Welcome
from stoker.feed.relay import protocol
from stoker.feed.relay.protocol import Join, RelaySourceEnd
from stoker.feed.relay.url import FeedUrl
from stoker.feed.settings import FeedSettings
from stoker.transport.address import join_address

# How often to look for the feed: a feeder takes seconds to start, and each look is a call of Ray.
# Chosen, not measured.
_POLL_S = 0.2
# How long a node may take to start a feeder before another node may start one: imports from a cold
# disk take long. Chosen, not measured.
_CLAIM_S = 60.0
# How long a node may take to restart a killed feeder: its modules are in memory by then. Chosen,
# not measured.
_RESTART_S = 5.0


def cluster_address(settings: FeedSettings) -> FeedAddress:
    """Return the address of the feed that all jobs of a Ray cluster share."""
    finder = ClusterFeedFinder(settings)
    return FeedAddress(
        settings.name,
        finder.connect,
        settings.target,
        is_restarted=True,
        on_welcome=finder.on_welcome,
    )


class ClusterFeedFinder:
    """Finds a feed on any node of the Ray cluster, or starts it on this node."""

    def __init__(self, settings: FeedSettings) -> None:
        self._settings = settings
        self._is_here = False
        self._has_connected = False
        self._placeholder: RelaySourceEnd | None = None

    def connect(self) -> socket.socket:
        """Connect to the feeder if it belongs on this node, else to this node's relay.

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
            if location.address and self._join_as_placeholder(location):
                url = FeedUrl(location.address, self._settings.name)
                settings = relay_settings(
                    url, self._settings.patience_s, insecure=self._settings.insecure
                )
                return connect_or_start(settings, location.token)
            if claim != location.claim:
                since_s, claim = time.monotonic(), location.claim
            if time.monotonic() - since_s >= self._patience_s(location):
                lost_claim = claim
            else:
                time.sleep(_POLL_S)

    def on_welcome(self, welcome: Welcome) -> None:
        """Publish the address of the feeder for the other jobs, if it is on this node."""
        self._has_connected = True
        if self._placeholder is not None:
            self._placeholder.close()
            self._placeholder = None
        if self._is_here and welcome.address:
            Directory().publish(self._settings.name, welcome.address)

    def _patience_s(self, location: FeedLocation) -> float:
        """Return how many seconds to wait for a feed that does not answer."""
        if not location.address:
            return _CLAIM_S
        return (
            _RESTART_S if self._has_connected else 0.0
        )  # the entry may be old: the feed may have ended long ago

    def _join_as_placeholder(self, location: FeedLocation) -> bool:
        """Join the feed, so that it does not end before the relay joins; False if it is lost."""
        try:
            self._placeholder = end = protocol.connect(
                location.address, location.token, insecure=self._settings.insecure
            )
            end.send(
                Join(protocol.VERSION, self._settings.name, "a job that starts a relay", None, [])
            )
            return isinstance(end.receive()[0], Welcome)
        except (EOFError, OSError, Malformed):
            return False
