"""Feeds that the jobs of a Ray cluster share: one feeder in the cluster, relays on other nodes."""

from __future__ import annotations

import dataclasses
import socket
import time

from stoker.feed.autostart import connect_or_start
from stoker.feed.connection import FeedAddress
from stoker.feed.lookup.ray_directory import Directory, FeedPlace
from stoker.feed.lookup.relay import relay_settings
from stoker.feed.messages import Malformed, Welcome
from stoker.feed.relay import protocol
from stoker.feed.relay.protocol import Join, RelaySourceEnd
from stoker.feed.relay.url import FeedUrl
from stoker.feed.settings import FeedSettings
from stoker.transport.link import joined_address

# A feeder takes seconds to start; each look is a call of Ray.
_LOOK_AGAIN_S = 0.2
# How long a node may take to start a feeder before another one may: imports on a cold disk take
# long.
_CLAIM_S = 60.0
# And to start it again, which its jobs do when it is killed: its modules are in memory by then.
_BACK_S = 5.0


def shared_in_cluster(settings: FeedSettings) -> FeedAddress:
    """Return the address of a feed that the jobs of a Ray cluster share."""
    found = SharedInCluster(settings)
    return FeedAddress(
        settings.name, found.connect, settings.target, is_restarted=True, note=found.note
    )


class SharedInCluster:
    """Finds a shared feed on any node of the cluster, or starts it on this one."""

    def __init__(self, settings: FeedSettings) -> None:
        self._settings = settings
        self._is_here = False
        self._was_there = False
        self._held: RelaySourceEnd | None = None

    def connect(self) -> socket.socket:
        """Connect to the feeder if it is to be on this node, else to the relay.

        Raises FeedError; ClusterError where this process has joined no cluster, ImportError
        without Ray.
        """
        directory = Directory()  # of the process that connects: a forked child has its own
        since_s, claim, lost = time.monotonic(), 0, 0
        while True:
            place = directory.find(self._settings.name, lost)
            self._is_here = place.is_here
            if place.is_here:
                listen = place.address or joined_address(directory.host, 0)
                settings = dataclasses.replace(self._settings, listen=listen)
                return connect_or_start(settings, place.token)
            if place.address and self._hold(place):
                url = FeedUrl(place.address, self._settings.name)
                settings = relay_settings(url, self._settings.patience_s)
                return connect_or_start(settings, place.token)
            if claim != place.claim:
                since_s, claim = time.monotonic(), place.claim
            if time.monotonic() - since_s >= self._patience_s(place):
                lost = claim
            else:
                time.sleep(_LOOK_AGAIN_S)

    def note(self, welcome: Welcome) -> None:
        """Tell the other jobs the address of the feeder that this job has connected to."""
        self._was_there = True
        if self._held is not None:
            self._held.close()
            self._held = None
        if self._is_here and welcome.address:
            Directory().tell(self._settings.name, welcome.address)

    def _patience_s(self, place: FeedPlace) -> float:
        """Return how many seconds to wait for a feed that does not answer."""
        if not place.address:
            return _CLAIM_S
        return _BACK_S if self._was_there else 0.0  # it may have ended long ago

    def _hold(self, place: FeedPlace) -> bool:
        """Join the feed, so that it is there until the relay has joined; False if it is lost."""
        try:
            self._held = end = protocol.connect(place.address, place.token)
            end.send(
                Join(protocol.VERSION, self._settings.name, "a job that starts a relay", None, [])
            )
            return isinstance(end.receive()[0], Welcome)
        except (EOFError, OSError, Malformed):
            return False
