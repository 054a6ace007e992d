"""A feed on this host: its Unix socket by its name, its settings, and how a job starts its feeder.

The socket's name is abstract: no file holds it, and the kernel frees it when the listening process
ends. Only one process can bind it. The job that binds it starts the feeder, and passes the
listening socket to it. Meanwhile other jobs connect, and wait until the feeder answers. If that job
or the feeder dies, the connections end, and the remaining jobs try to bind the socket again.
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

from stoker.basics import process
from stoker.errors import FeedError
from stoker.feeds import messages

# The wait between two tries to connect: short beside the start of a feeder (seconds), long beside a
# try (microseconds). Chosen, not measured.
_POLL_S = 0.05
# Connections that may wait: more jobs than connect to one host at once, and the most that kernels
# before 5.4 take.
_BACKLOG = 128
# The wait for another process that has bound the name: it listens a few system calls later.
_RETRY_S = 0.005
FEEDER_VARIABLE = "STOKER_FEEDER"  # set in a feeder's environment to its process id
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_START_PROGRAM = """
import os, sys
if os.fork():
    os._exit(0)
from stoker.feeds.server import main
main(int(sys.argv[1]), sys.argv[2])
"""


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


@dataclass(frozen=True)
class FeedSettings:
    """A feed: its name, its pipeline, and how it is prepared and shared.

    Attributes:
        name: the feed's name.
        target: ``FILE.py:FUNCTION`` or ``module:FUNCTION``.
        staging: how many items shared memory may hold.
        jobs: how many to wait for before the first epoch begins.
        timeout_s: seconds that the other jobs wait for a job that does not respond.
        autostarted: whether a job starts the feeder, so that it ends with the last one.
        path: the feeder's ``sys.path``.
        listen: ``host:port`` for other hosts; empty for this host only.
        insecure: whether connections to other hosts are not encrypted.
    """

    name: str
    target: str
    staging: int | None = None
    jobs: int = 1
    timeout_s: float = 60.0
    autostarted: bool = False
    path: tuple[str, ...] = ()
    listen: str = ""
    insecure: bool = False


def connect_or_start(settings: FeedSettings) -> socket.socket:
    """Connect to a feed; start its feeder if there is none."""
    while True:
        connection = connect(settings.name)
        if connection is not None:
            return connection
        listener = listen(settings.name)
        if listener is None:  # another process has bound the name, and listens in a moment
            time.sleep(_RETRY_S)
            continue
        with contextlib.closing(listener):
            _start(listener, settings)


def check_not_in_feeder() -> None:
    """Raise FeedError in a feeder's process: it imports the script of the job that started it."""
    if os.environ.get(FEEDER_VARIABLE) == str(os.getpid()):
        raise FeedError(
            "the script calls stoker.feed() while the feeder imports it: put the training code "
            'below if __name__ == "__main__":'
        )


def _start(listener: socket.socket, settings: FeedSettings) -> None:
    """Start a feeder in its own session, so that it is no child of this process and outlives it."""
    number = listener.fileno()
    environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    subprocess.run(
        [sys.executable, "-c", _START_PROGRAM, str(number), json.dumps(asdict(settings))],
        pass_fds=[number],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, settings.path))},
        check=True,
    )
