"""What a forked child may do with what it inherits.

A child has a copy of its parent's memory, but none of its threads, and locks as they were held; it
shares its sockets. So what belongs to a process is used by that process alone, and sockets whose
end tells others that their owner is gone are closed in children.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket  # importing it takes time

_this_process = object()  # another one in every process
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class OwningProcess:
    """The process that something was made in."""

    def __init__(self) -> None:
        self._process = _this_process

    @property
    def is_current(self) -> bool:
        """Whether it is this process, and not one that this process was forked from."""
        return self._process is _this_process


def close_in_children(opened: socket.socket) -> None:
    """Have a socket closed in every child that is forked from now on."""
    _sockets.add(opened)


def has_jax_started() -> bool:
    """Tell whether JAX runs threads in this process. A forked child that uses JAX then hangs."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    ask = getattr(bridge, "backends_are_initialized", None)
    return ask is not None and bool(ask())


def _in_child() -> None:
    global _this_process
    _this_process = object()
    for opened in list(_sockets):
        opened.close()
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
