"""Records in a file how a process that iterates loaders ends, when the interpreter exits.

There is no file for a process that is killed, that calls ``os._exit`` with an error, or that is a
daemonic child which its parent ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from multiprocessing import util
from typing import NoReturn

from .records import Recorder, write_json

# Of a traceback's end, where the error stands: a report shows no more.
_LINES = 20


def watch_end(recorder: Recorder) -> None:
    """Record the end of this process in ``process-PID.ended``."""
    # Not atexit, which children of multiprocessing leave out.
    path = recorder.base + ".ended"
    util.Finalize(None, _write_end, (path,), exitpriority=0)
    leave = os._exit

    @functools.wraps(leave)
    def _exit(status: int) -> NoReturn:
        # Forked children inherit this. A process that ended as Python does has already recorded it.
        if status == 0 and os.getpid() == recorder.pid and not os.path.exists(path):
            _write_end(path)
        leave(status)

    os._exit = _exit


def _write_end(path: str) -> None:
    # In a child of multiprocessing it is on its way; else the interpreter has shown it.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and not error.code:
        error = None
    text = None
    if error is not None:
        lines = "".join(traceback.format_exception(error)).splitlines()
        text = "\n".join(lines[-_LINES:])
    with contextlib.suppress(OSError):
        write_json(path, {"error": text, "at_ns": time.monotonic_ns()})
