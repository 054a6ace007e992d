"""Ctrl-C at a moment that suits: what must not be left half done is not interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

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


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a block come to its end; a Ctrl-C comes behind it."""
    one = Deferred()
    one.begin()
    try:
        yield
    finally:
        if one.end():
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Let a block of a finalizer come to its end: what is raised there is lost."""
    one = Deferred()
    one.begin()
    try:
        yield
    finally:
        if one.end():
            again_soon()


def again_soon() -> None:
    """Have a Ctrl-C come once more, where raising it now would lose it."""
    sender = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    sender.daemon = True
    sender.start()
