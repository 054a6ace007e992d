"""Finding or starting this host's relay for a feed of another host.

A relay is found, started and replaced like the feeder of a ``share``, with the feed's URL as its
name.
"""

from __future__ import annotations

import sys

from stoker.feed.autostart import connect_or_start
from stoker.feed.connection import FeedAddress
from stoker.feed.relay.url import FeedUrl
from stoker.feed.settings import FeedSettings
from stoker.feed.token import find_token
from stoker.transport.tls import host_tls

# Of a feeder, where nothing else is known: as long as a node may take to start one.
_PATIENCE_S = 60.0


def relayed(url: FeedUrl) -> FeedAddress:
    """Return the address of a feed on another host, through the relay on this one.

    Raises TokenError if the relay could not read the token or the TLS key.
    """
    find_token()
    host_tls()
    settings = relay_settings(url)
    return FeedAddress(str(url), lambda: connect_or_start(settings), is_restarted=True)


def relay_settings(url: FeedUrl, patience_s: float = _PATIENCE_S) -> FeedSettings:
    """Return a relay's settings. Its patience is half of the feeder's patience with the relay."""
    text, path = str(url), tuple(sys.path)
    return FeedSettings(text, text, patience_s=patience_s / 2, autostarted=True, path=path)
