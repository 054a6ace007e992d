"""Feeds that the jobs of a Ray cluster share: one feeder in the cluster, relays on other nodes."""

from __future__ import annotations

import dataclasses
import socket
import time

from stoker.feed import crossing, ray_directory
from stoker.feed.autostart import connect_or_start
from stoker.feed.connection import FeedAddress
from stoker.feed.crossing import Join, RelayEnd
from stoker.feed.messages import Malformed, Welcome
from stoker.feed.ray_directory import FeedPlace
from stoker.feed.relayed import relay_settings
from stoker.feed.target import FeedSettings
from stoker.feed.url import FeedUrl
from stoker.net.address import joined_address

_LOOK_AGAIN_S = 0.2


def shared_in_cluster(settings: FeedSettings) -> FeedAddress:
    """Return the address of a feed that the jobs of a Ray cluster share."""
    found = SharedInCluster(settings)
    return FeedAddress(
        settings.name, found.connect, settings.target, is_restarted=True, note=found.note
    )


class SharedInCluster:
    """How a job finds a shared feed, wherever in the cluster it is, or starts it here."""

    def __init__(self, settings: FeedSettings) -> None:
        self._settings = settings
        self._node = ""
        self._is_here = False
        self._held: RelayEnd | None = None

    def connect(self) -> socket.socket:
        """Connect to the feeder if it is to be on this node, else to the relay.

        Raises FeedError.
        """
        lost = ""
        while True:
            # In the process that connects: a forked child asks for itself.
            self._node, host = ray_directory.own_node()
            answer: FeedPlace = ray_directory.call("find", self._settings.name, self._node, lost)
            self._is_here = answer.is_here
            if answer.is_here:
                listen = answer.address or joined_address(host, 0)
                settings = dataclasses.replace(self._settings, listen=listen)
                return connect_or_start(settings, answer.token)
            if answer.address and self._hold(answer):
                url = FeedUrl(answer.address, self._settings.name)
                return connect_or_start(relay_settings(url), answer.token)
            lost = answer.address
            time.sleep(_LOOK_AGAIN_S)

    def note(self, welcome: Welcome) -> None:
        """Tell the others where the feeder is that this job has connected to."""
        if self._held is not None:
            self._held.close()
            self._held = None
        if self._is_here and welcome.address:
            name = self._settings.name
            ray_directory.call("tell", name, self._node, welcome.address)

    def _hold(self, answer: FeedPlace) -> bool:
        """Join the feed, so that it is there until the relay has joined; False if it is lost."""
        try:
            self._held = end = crossing.connect(answer.address, answer.token)
            end.send(
                Join(crossing.VERSION, self._settings.name, "a job that starts a relay", None, [])
            )
            return isinstance(end.receive()[0], Welcome)
        except (EOFError, OSError, Malformed):
            return False
