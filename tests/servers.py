"""Servers that answer in a thread of their own."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator
from typing import TypeVar

S = TypeVar("S", bound=socketserver.BaseServer)


@contextlib.contextmanager
def serving(made: S) -> Iterator[S]:
    """Serve until the end, then close."""
    with made as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
