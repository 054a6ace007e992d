"""Ctrl-C at a moment that suits: what must not be left half done is not interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
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
    """Let a block come to its end; a Ctrl-C comes behind it."""
    one = Deferred()
    one.begin()
    try:
        yield
    finally:
        if one.end():
            come()
