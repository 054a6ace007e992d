"""How jobs find a feed, and who starts its feeder.

A feed's address is an abstract socket name, which the kernel frees with the process that listens
there. Whoever binds it is elected: only one can. A job that is elected hands the listening socket
to the feeder that it starts; others connect meanwhile, and wait until the feeder answers. Should
either die, their connections end, and one of them is elected anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from stoker.errors import FeedError
from stoker.feed import fork_safety, messages

_BACKLOG = 128
_AGAIN_S = 0.005
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_START = """
import os, sys
if os.fork():
    os._exit(0)
from stoker.feed.autostarted import main
main(int(sys.argv[1]), sys.argv[2])
"""


@dataclass(frozen=True)
class Autostart:
    """How to start a feeder: its target, the path to import from, and its settings."""

    target: str
    path: list[str]
    staging: int | str | None
    jobs: int
    patience_s: float

    def text(self) -> str:
        """Write it for the command line of a feeder."""
        return json.dumps(asdict(self))


def check_name(name: str) -> None:
    """Raise ValueError unless a text can be the name of a feed."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(
            f"{name!r} cannot be the name of a feed: up to 64 letters, digits, dots, dashes and "
            "underscores can"
        )


def address(name: str) -> bytes:
    """Return the socket address of this user's feed of that name."""
    return f"\0stoker-feed-{os.getuid()}-{name}".encode()


def listening(name: str) -> socket.socket | None:
    """Return a socket that listens under a feed's name; None where somebody else has it."""
    listener = _socket()
    try:
        listener.bind(address(name))
    except OSError:
        listener.close()
        return None
    listener.listen(_BACKLOG)
    return listener


def connected(name: str) -> socket.socket | None:
    """Connect to a feed; None where nobody listens.

    Raises FeedError when the name belongs to another user's process.
    """
    connection = _socket()
    try:
        connection.connect(address(name))
        _, user = messages.peer_of(connection)
    except OSError:
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    if user != os.getuid():
        connection.close()
        raise FeedError(f"the feed {name!r} belongs to another user")
    return connection


def connected_within(name: str, patience_s: float) -> socket.socket | None:
    """Connect to a feed that may just be starting."""
    until_s = time.monotonic() + patience_s
    while True:
        connection = connected(name)
        if connection is not None or time.monotonic() > until_s:
            return connection
        time.sleep(_AGAIN_S * 10)


def connected_or_founded(name: str, founding: Autostart) -> socket.socket:
    """Connect to a feed; where there is none, start its feeder."""
    while True:
        connection = connected(name)
        if connection is not None:
            return connection
        listener = listening(name)
        if listener is None:  # somebody has bound the name, and will listen in a moment
            time.sleep(_AGAIN_S)
            continue
        with contextlib.closing(listener):
            _start(listener, founding)


def _start(listener: socket.socket, founding: Autostart) -> None:
    """Start a feeder, in a session of its own: it outlives this process, and is not its child."""
    number = listener.fileno()
    environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    subprocess.run(
        [sys.executable, "-c", _START, str(number), founding.text()],
        pass_fds=[number],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=True,
    )


def _socket() -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork_safety.add(opened)
    return opened
