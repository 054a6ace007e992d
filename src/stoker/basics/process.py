"""Processes: what a forked child may do with what it inherits, and children that end with their
parent.

A child has a copy of its parent's memory, but none of its threads, and locks as they were held; it
shares its sockets. So what belongs to a process is used by that process alone, and sockets whose
end tells others that their owner is gone are closed in children.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket  # importing it takes time


_this_process = object()  # another one in every process
_pid = os.getpid()
_forks = 0  # under way in this process: hooks older than ours run in a child before ours
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class OwningProcess:
    """The process that something was made in."""

    def __init__(self) -> None:
        self._process = _this_process

    @property
    def is_current(self) -> bool:
        """Whether it is this process, and not one that this process was forked from."""
        return self._process is _this_process and (not _forks or os.getpid() == _pid)


def close_in_children(opened: socket.socket) -> None:
    """Have a socket closed in every child that is forked from now on."""
    _sockets.add(opened)


def has_jax_started() -> bool:
    """Tell whether JAX runs threads in this process. A forked child that uses JAX then hangs."""
    # By a module of JAX's own: its public functions would start the threads that are asked about.
    bridge = sys.modules.get("jax._src.xla_bridge")
    ask = getattr(bridge, "backends_are_initialized", None)
    return ask is not None and bool(ask())


def _before_fork() -> None:
    global _forks
    _forks += 1


def _in_parent() -> None:
    global _forks
    _forks -= 1


def _in_child() -> None:
    global _this_process, _pid, _forks
    _this_process, _pid, _forks = object(), os.getpid(), 0
    for opened in list(_sockets):
        opened.close()
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


# Of prctl(2), which Python does not name.
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
