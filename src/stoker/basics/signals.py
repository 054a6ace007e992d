"""Deferring Ctrl-C to a safe moment, and recognising exceptions raised by signal handlers."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

# A finalizer or hook has returned by then, and a user who pressed Ctrl-C does not notice it.
_AGAIN_S = 0.01


class Deferred:
    """Takes note of Ctrl-C from ``begin`` to ``end``. Does nothing outside of the main thread."""

    def __init__(self) -> None:
        self._before: Any = None
        self._noted = False

    def begin(self) -> None:
        """Take note from now on."""
        self._noted = False
        here = threading.current_thread() is threading.main_thread()
        if here and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)

    def end(self) -> bool:
        """Go back to what was before; return whether there was a Ctrl-C meanwhile."""
        before, self._before = self._before, None
        if before is not None:
            signal.signal(signal.SIGINT, before)
        return self._noted

    def _note(self, *_: object) -> None:
        self._noted = True


def at_once() -> None:
    """Have a Ctrl-C come now."""
    signal.raise_signal(signal.SIGINT)


def again_soon() -> None:
    """Have a Ctrl-C come where raising it now would lose it: in finalizers and hooks of a fork."""
    sender = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    sender.daemon = True
    sender.start()


@contextlib.contextmanager
def deferred(come: Callable[[], None] = at_once) -> Iterator[None]:
    """Run a block to its end; a Ctrl-C that comes meanwhile is raised after it."""
    one = Deferred()
    one.begin()
    try:
        yield
    finally:
        if one.end():
            come()


def pass_on(error: BaseException) -> None:
    """Raise an exception again if it, or one of its causes, came from a signal handler.

    Call this wherever an exception would be attributed to a stage. A handler's exception is raised
    wherever the main thread happens to be, and must reach whoever installed the handler (such as a
    timeout, or a request to stop).
    """
    if threading.current_thread() is not threading.main_thread():
        return
    cause: BaseException | None = error
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None and trace.tb_next is not None:
            if _is_handler(trace.tb_next.tb_frame, trace.tb_frame):
                raise error
            trace = trace.tb_next
        cause = cause.__cause__ or cause.__context__


def _is_handler(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether a frame was given a signal's number and what it interrupted, as handlers are."""
    names, rest, _, values = inspect.getargvalues(frame)
    given = [values.get(name) for name in names]
    given += values.get(rest, ()) if rest else ()
    return any(isinstance(a, int) and b is interrupted for a, b in pairwise(given))
