"""Starting a feeder: the election among jobs, and the feeder process's entry point.

The job that binds the feed's socket is elected; only one can bind it. The elected job starts the
feeder and hands it the listening socket. Other jobs connect meanwhile, and wait until the feeder
answers. If the elected job or the feeder dies, the connections end, and the remaining jobs elect
one again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from typing import NoReturn

from stoker.errors import FeedError
from stoker.feed.local_socket import connect, listen
from stoker.feed.settings import FeedSettings
from stoker.feed.token import IN_ENVIRONMENT

SWITCH_S = 0.0005
"""The interpreter's switch interval in feeders, a tenth of Python's own: messages to jobs must
not wait long for threads that prepare."""
# The process that has bound the name listens a few system calls later.
_AGAIN_S = 0.005
_IN_FEEDER = "STOKER_FEEDER"  # in the environment of a feeder: its process id
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_START = """
import os, sys
if os.fork():
    os._exit(0)
from stoker.feed.autostart import main
main(int(sys.argv[1]), sys.argv[2])
"""


def connect_or_start(settings: FeedSettings, token: bytes | None = None) -> socket.socket:
    """Connect to a feed; where there is none, start its feeder.

    ``token`` is a cluster's token; by default a feeder on the network uses the user's own token.
    """
    while True:
        connection = connect(settings.name)
        if connection is not None:
            return connection
        listener = listen(settings.name)
        if listener is None:  # somebody has bound the name, and will listen in a moment
            time.sleep(_AGAIN_S)
            continue
        with contextlib.closing(listener):
            _start(listener, settings, token)


def check_not_in_feeder() -> None:
    """Refuse ``share`` in a feeder that is importing the script of the job that started it.

    Raises FeedError.
    """
    if os.environ.get(_IN_FEEDER) == str(os.getpid()):
        raise FeedError(
            "the script shares a pipeline while it is imported: put what it does below "
            'if __name__ == "__main__":'
        )


def _start(listener: socket.socket, settings: FeedSettings, token: bytes | None) -> None:
    """Start a feeder in its own session: it outlives this process, and is not its child."""
    number = listener.fileno()
    environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    if token is not None:
        environment[IN_ENVIRONMENT] = token.hex()
    subprocess.run(
        [sys.executable, "-c", _START, str(number), json.dumps(asdict(settings))],
        pass_fds=[number],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=True,
    )


# What follows runs in the feeder.


def main(descriptor: int, text: str) -> NoReturn:
    """Serve at a listening socket until the last job has gone."""
    from stoker.feed.server import open_server  # jobs need none of it

    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    settings = FeedSettings(**json.loads(text))
    os.environ[_IN_FEEDER] = str(os.getpid())
    sys.path[:] = settings.path
    sys.argv = [settings.target.rpartition(":")[0]]
    sys.setswitchinterval(SWITCH_S)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # what is open is closed then, too
    try:
        feeder = open_server(listener, settings)
        with contextlib.closing(feeder):
            feeder.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        _close_caches()
        os._exit(0)  # threads of the user's may not want to end


def _close_caches() -> None:
    """Close the pipeline's caches: their finalizers do not run in this process."""
    if (caching := sys.modules.get("stoker.cache.handles")) is not None:
        caching.HANDLES.close_all()
