"""The Unix socket of a feed, by the feed's name.

The name is abstract: no file holds it, and the kernel frees it when the listening process ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time

from stoker.basics import process
from stoker.errors import FeedError
from stoker.feeds import messages

# The wait between two tries to connect: short beside the start of a feeder (seconds), long beside a
# try (microseconds). Chosen, not measured.
_POLL_S = 0.05
# Connections that may wait: more jobs than connect to one host at once, and the most that kernels
# before 5.4 take.
_BACKLOG = 128


def check_name(name: str) -> None:
    """Raise ValueError unless ``name`` is a valid feed name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(
            f"{name!r} is not a valid name of a feed: use up to 64 letters, digits, dots, dashes "
            "and underscores"
        )


def address_of(name: str) -> bytes:
    """Return the socket address of this user's feed with that name."""
    return f"\0stoker-feed-{os.getuid()}-{name}".encode()


def listen(name: str) -> socket.socket | None:
    """Return a socket that listens under a feed's name; None if the name is taken."""
    listener = _new_socket()
    try:
        listener.bind(address_of(name))
    except OSError:
        listener.close()
        return None
    listener.listen(_BACKLOG)
    return listener


def connect(name: str) -> socket.socket | None:
    """Connect to a feed; None if no process listens there.

    Raises FeedError if the process belongs to another user.
    """
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(_new_socket())
        try:
            connection.connect(address_of(name))
            _, user = messages.peer_credentials(connection)
        except OSError:
            return None
        if user != os.getuid():
            raise FeedError(f"the feed {name!r} belongs to another user (id {user})")
        undo.pop_all()
    return connection


def connect_within(name: str, timeout_s: float) -> socket.socket | None:
    """Connect to a feed that may be starting; None if it does not listen within ``timeout_s``."""
    until_s = time.monotonic() + timeout_s
    while True:
        connection = connect(name)
        if connection is not None or time.monotonic() > until_s:
            return connection
        time.sleep(_POLL_S)


def _new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process.close_in_children(sock)
    return sock
