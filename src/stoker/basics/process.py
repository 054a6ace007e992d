"""Forked children: parts of their parent that they must not use, and ending with the parent.

A forked child has a copy of its parent's memory and shares its sockets. It has none of its threads,
and locks stay held in it if a thread held them. So objects remember the process that made them
(``OwningProcess``), and a child closes sockets whose end tells a peer that their owner is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker.basics.future import start_thread

if TYPE_CHECKING:
    import socket  # only for types: importing it takes time


WORKER_NAME = "stoker-worker"
"""How the names of worker threads begin; that of worker processes."""

_this_process = object()  # replaced in every forked child
_pid = os.getpid()
_forks = 0  # forks under way: in a child, hooks that were registered before ours run before it
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class OwningProcess:
    """Remembers the process in which it was made."""

    def __init__(self) -> None:
        self._process = _this_process

    @property
    def is_current(self) -> bool:
        """True if this is still that process, and not a forked child of it."""
        return self._process is _this_process and (not _forks or os.getpid() == _pid)


def close_in_children(sock: socket.socket) -> None:
    """Close a socket in every child that is forked from now on."""
    _sockets.add(sock)


def has_jax_started() -> bool:
    """True if JAX runs threads in this process: a forked child that uses JAX would then hang."""
    # A private module of JAX: its public functions would start these threads.
    bridge = sys.modules.get("jax._src.xla_bridge")
    is_initialized = getattr(bridge, "backends_are_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def has_polars_started() -> bool:
    """True if Polars runs threads in this process: a forked child that uses Polars would hang."""
    if "polars" not in sys.modules:
        return False
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    return any(re.fullmatch(r"polars-\d+", name) for name in names)


def _before_fork() -> None:
    global _forks
    _forks += 1


def _in_parent() -> None:
    global _forks
    _forks -= 1


def _in_child() -> None:
    global _this_process, _pid, _forks
    _this_process, _pid, _forks = object(), os.getpid(), 0
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


# A constant of prctl(2) that Python does not name.
_PR_SET_PDEATHSIG = 1


def end_with(
    parent: int, by_main_thread: bool, *, before_exit: Callable[[], object] | None = None
) -> None:
    """End this process when its parent ends, whatever either of them is doing.

    The kernel's signal (PR_SET_PDEATHSIG) comes at once, but when the thread that forked ends, or
    under forkserver when the server ends: so only ``by_main_thread``. A pidfd shows the end of the
    process itself; ``before_exit`` is called then.
    """
    if by_main_thread and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # the kernel or a sandbox does not allow it
        return

    def watch() -> None:
        poll = select.poll()  # as `select` takes no descriptor above 1023
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        try:
            if before_exit is not None:
                before_exit()
        finally:
            os._exit(1)

    start_thread("stoker-parent-watch", watch)
