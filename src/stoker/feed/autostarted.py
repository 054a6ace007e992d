"""A feeder that a job has started for itself and others: what runs in its process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

from stoker.errors import StokerError
from stoker.feed import messages, target
from stoker.feed.autostart import Autostart
from stoker.feed.server import FeedServer

SWITCH_S = 0.0005  # what talks to the jobs must not wait long for what prepares
_TOLD_S = 1.0


def main(descriptor: int, settings: str) -> NoReturn:
    """Serve at a listening socket until the last job has gone."""
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    founding = Autostart(**json.loads(settings))
    os.environ[target.IN_FEEDER] = str(os.getpid())
    sys.path[:] = founding.path
    sys.argv = [founding.target.rpartition(":")[0]]
    sys.setswitchinterval(SWITCH_S)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # what is open is closed then, too
    status = 1
    try:
        _serve(listener, founding)
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _close_caches()
        os._exit(status)  # threads of the user's may not want to end


def _serve(listener: socket.socket, founding: Autostart) -> None:
    name = listener.getsockname()[1:].decode().split("-", 3)[3]
    try:
        feeder = FeedServer(
            listener,
            target.made(founding.target),
            name=name,
            target=founding.target,
            staging=founding.staging,
            jobs=founding.jobs,
            patience_s=founding.patience_s,
            founded=True,
        )
    except (StokerError, ValueError, TypeError) as error:
        return refuse(listener, str(error))
    try:
        feeder.serve()
    finally:
        feeder.close()


def _close_caches() -> None:
    """Close what the pipeline has cached: finalizers, which would do it, do not run."""
    if (caching := sys.modules.get("stoker.cache.handles")) is not None:
        caching.HANDLES.close_all()


def refuse(listener: socket.socket, reason: str) -> None:
    """Tell everybody who has connected, and those who do in a moment, why there is no feed."""
    until_s = time.monotonic() + _TOLD_S
    with contextlib.closing(listener):
        while (left_s := until_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            with contextlib.suppress(OSError, messages.Malformed):
                connection, _ = listener.accept()
                with connection:  # what is not read before the end would hide what is said
                    connection.settimeout(left_s)
                    messages.receive_as_feeder(connection)
                    messages.send(connection, messages.Refused(messages.plain(reason)))
