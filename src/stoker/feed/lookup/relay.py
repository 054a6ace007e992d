"""Finds or starts this host's relay for a feed of another host.

Jobs find, start and replace a relay like the feeder of a ``share``; its name is the feed's URL.
"""

from __future__ import annotations

import sys

from stoker.feed.autostart import connect_or_start
from stoker.feed.connection import FeedAddress
from stoker.feed.relay.url import FeedUrl
from stoker.feed.settings import FeedSettings
from stoker.feed.token import find_token
from stoker.transport.secret import Secret

# The patience of the feeder, if it is not known: the default of ``share`` and ``stoker feed``.
_PATIENCE_S = 60.0


def relay_address(url: FeedUrl, *, insecure: bool = False) -> FeedAddress:
    """Return the address of a feed on another host, through the relay on this host.

    Raises what the relay would raise: TokenError if the token or a certificate cannot be read,
    ImportError if cryptography is missing.
    """
    Secret.of_host(find_token(), insecure=insecure).context(server=False)
    settings = relay_settings(url, insecure=insecure)
    return FeedAddress(str(url), lambda: connect_or_start(settings), is_restarted=True)


def relay_settings(
    url: FeedUrl, patience_s: float = _PATIENCE_S, *, insecure: bool
) -> FeedSettings:
    """Return a relay's settings.

    Its patience with a job is half of the feeder's patience with the relay: otherwise one frozen
    job could make the feeder evict the whole relay.
    """
    text, path = str(url), tuple(sys.path)
    return FeedSettings(
        text, text, patience_s=patience_s / 2, autostarted=True, path=path, insecure=insecure
    )
