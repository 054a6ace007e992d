"""Processes that end with the one that started them, however that dies."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with(
    parent: int, by_main_thread: bool, *, first: Callable[[], object] | None = None
) -> None:
    """Have this process end with its parent, however that dies and whatever it is doing.

    The kernel's own signal comes at once, but tells of the thread that forked, and under
    forkserver of the server; a pidfd tells of the process.

    Args:
        parent: its number.
        by_main_thread: whether its main thread has started this process.
        first: what is done before; not if its main thread has started this process.
    """
    if not sys.platform.startswith("linux"):
        return
    if by_main_thread and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel or a sandbox without it
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        try:
            if first is not None:
                first()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="stoker-parent-watch", daemon=True).start()
