"""Sockets that a forked child must not keep open: it would hide that their owner is gone."""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def add(opened: socket.socket) -> None:
    """Have a socket closed in every child that is forked from now on."""
    _sockets.add(opened)


def _close() -> None:
    for opened in list(_sockets):
        opened.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close)
