"""A feed's settings, and how a job starts its feeder.

Only one process can bind the feed's socket. The job that binds it starts the feeder, and passes the
listening socket to it. Meanwhile other jobs connect, and wait until the feeder answers. If that job
or the feeder dies, the connections end, and the remaining jobs try to bind the socket again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from stoker.errors import FeedError
from stoker.feeds.local_socket import connect, listen

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
        env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=True,
    )
