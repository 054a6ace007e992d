"""A feed's socket on its host, found by the feed's name.

It is an abstract socket name, which the kernel frees with the process that listens there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time

from stoker.basics import process
from stoker.errors import FeedError
from stoker.feed import messages

# Short beside a feeder's start, long beside a look.
_LOOK_AGAIN_S = 0.05
# More jobs than connect at a moment on one host; kernels before 5.4 take no more.
_BACKLOG = 128
# An address has 107 bytes, of which the rest is the prefix and the user's number.
_NAME_CHARACTERS = 64


def check_name(name: str) -> None:
    """Raise ValueError unless ``name`` is a valid feed name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(
            f"{name!r} cannot be the name of a feed: up to 64 letters, digits, dots, dashes and "
            "underscores can"
        )


def address_of(name: str) -> bytes:
    """Return the socket address of this user's feed of that name."""
    if len(name) > _NAME_CHARACTERS:  # of a feed on another host
        name = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"\0stoker-feed-{os.getuid()}-{name}".encode()


def listen(name: str) -> socket.socket | None:
    """Return a socket that listens under a feed's name; None if the name is taken."""
    listener = _socket()
    try:
        listener.bind(address_of(name))
    except OSError:
        listener.close()
        return None
    listener.listen(_BACKLOG)
    return listener


def connect(name: str) -> socket.socket | None:
    """Connect to a feed; None if no process listens.

    Raises FeedError when the name belongs to another user's process.
    """
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(_socket())
        try:
            connection.connect(address_of(name))
            _, user = messages.peer_of(connection)
        except OSError:
            return None
        if user != os.getuid():
            raise FeedError(f"the feed {name!r} belongs to another user")
        undo.pop_all()
    return connection


def connect_within(name: str, patience_s: float) -> socket.socket | None:
    """Connect to a feed that may just be starting."""
    until_s = time.monotonic() + patience_s
    while True:
        connection = connect(name)
        if connection is not None or time.monotonic() > until_s:
            return connection
        time.sleep(_LOOK_AGAIN_S)


def _socket() -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process.close_in_children(opened)
    return opened
