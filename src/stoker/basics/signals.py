"""Defers Ctrl-C to a safe moment, and recognises exceptions that signal handlers raise."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

# The delay until a Ctrl-C is sent again: a finalizer or hook has returned by then, and a user does
# not notice it. Chosen, not measured.
_RESEND_S = 0.01


class Deferred:
    """Records a Ctrl-C between ``begin`` and ``end``. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self._previous_handler: Any = None
        self._has_come = False

    def begin(self) -> None:
        """Record Ctrl-C from now on."""
        self._has_come = False
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and callable(signal.getsignal(signal.SIGINT)):
            self._previous_handler = signal.signal(signal.SIGINT, self._record)

    def end(self) -> bool:
        """Restore the handler; True if a Ctrl-C came meanwhile."""
        previous_handler, self._previous_handler = self._previous_handler, None
        if previous_handler is not None:
            signal.signal(signal.SIGINT, previous_handler)
        return self._has_come

    def _record(self, *_: object) -> None:
        self._has_come = True


def at_once() -> None:
    signal.raise_signal(signal.SIGINT)


def again_soon() -> None:
    """Send a Ctrl-C a moment later: finalizers and fork hooks would lose an exception."""
    sender = threading.Timer(_RESEND_S, os.kill, (os.getpid(), signal.SIGINT))
    sender.daemon = True
    sender.start()


@contextlib.contextmanager
def defer_interrupts(raise_it: Callable[[], None] = at_once) -> Iterator[None]:
    """Run a block to its end; a Ctrl-C that comes meanwhile is raised afterwards."""
    interrupt = Deferred()
    interrupt.begin()
    try:
        yield
    finally:
        if interrupt.end():
            raise_it()


def finalize(owner: Any, function: Callable[..., object], *args: Any) -> weakref.finalize[Any, Any]:
    """Call a function once an object is gone, like ``weakref.finalize``, without losing a Ctrl-C.

    Python drops exceptions of a finalizer. So a Ctrl-C is sent again that comes in the
    function, or that came in C code before it and is raised where the first Python code begins.
    """
    guard: list[weakref.ref[Any]] = []
    found = weakref.finalize(owner, _finalize, guard, function, args)
    # The latest callback is called first; each is called, whatever the one before has raised.
    guard.append(weakref.ref(owner, lambda _: guard.clear()))
    return found


def _finalize(guard: list[weakref.ref[Any]], function: Callable[..., object], args: Any) -> None:
    # The finalizer of an object that is still there was called, and raises as any function does.
    is_gone = not guard or guard[0]() is None
    if is_gone and guard:
        again_soon()
    try:
        function(*args)
    except KeyboardInterrupt:
        if not is_gone:
            raise
        again_soon()


def raise_interrupt(error: BaseException) -> None:
    """Raise the Ctrl-C that an exception hides, if there is one.

    A terminal's Ctrl-C ends workers, too: PyTorch's handler for dead workers may then raise another
    exception in its place.
    """
    hidden: BaseException | None = error
    while hidden is not None:
        if isinstance(hidden, KeyboardInterrupt):
            raise hidden
        hidden = hidden.__context__


def pass_on(error: BaseException) -> None:
    """Raise an exception again if a signal handler raised it, or one of its causes.

    Call this wherever an exception would be attributed to a stage: a handler's comes wherever the
    main thread happens to be, and must reach the code that installed the handler.
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
    """True if a frame has the arguments of a signal handler: a number and the interrupted frame."""
    names, rest, _, values = inspect.getargvalues(frame)
    arguments = [values.get(name) for name in names]
    arguments += values.get(rest, ()) if rest else ()
    return any(isinstance(a, int) and b is interrupted for a, b in pairwise(arguments))
