"""Accepting connections from processes of the same cluster."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker.basics import process
from stoker.transport.link import Link, LinkError, joined_address

if TYPE_CHECKING:
    from stoker.transport.tls import Tls

# For a peer to show that it has the token: bench/encryption.py, at most 20 ms to connect on a busy
# machine.
_PROVE_S = 2.0
# Connections at a time that have not shown it; for one more, the first is closed. Few beside 1,024
# descriptors.
_STRANGERS = 64
# As long as a user waits without a word for a thread that ends.
_JOIN_S = 5.0


class Listener:
    """Accepts connections on one interface, and serves each in a separate thread.

    Args:
        host: the interface's address; all interfaces only if that address is given.
        port: 0: any that is free.
        token: the cluster's secret.
        purpose: the name of the service.
        serve: called with each authenticated connection, which is closed when the call returns or
            raises because the connection ended. Other exceptions are reported like any thread's.
        timeout_s: the connections' longest silence within a frame, in seconds.
        tls: certificates of this host that encrypt connections; None: the token encrypts them,
            except within this host.
        insecure: the network is trusted: without ``tls`` connections are not encrypted.

    Raises OSError if the address is not free, TokenError if the TLS files cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        purpose: str,
        serve: Callable[[Link], None],
        *,
        timeout_s: float = 30.0,
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> None:
        self._token = token
        self._purpose = purpose
        self._serve = serve
        self._timeout_s = timeout_s
        self._tls = tls
        self._insecure = insecure
        if tls is not None:
            tls.context(server=True)  # what is wrong with it is said now
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._threads: set[threading.Thread] = set()
        self._strangers: dict[socket.socket, None] = {}  # who came first is in front
        self._is_closed = False
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # All jobs or nodes may connect at one moment; kernels before 5.4 take no more.
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        process.close_in_children(self._socket)
        self.address = joined_address(host, self._socket.getsockname()[1])
        """``host:port``, with the actual port."""
        self._thread = threading.Thread(
            target=self._accept, name=f"stoker-{purpose}-accept", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, end all connections, and wait up to 5 s for their threads."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        with self._lock:
            links, threads = list(self._links), list(self._threads)
        for link in links:
            link.close()
        until = time.monotonic() + _JOIN_S
        for thread in (self._thread, *threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connected, found = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.05)  # no descriptors are left: those who connect wait
                continue
            with self._lock:
                if len(self._strangers) == _STRANGERS:
                    first = next(iter(self._strangers))
                    del self._strangers[first]
                    with contextlib.suppress(OSError):
                        first.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
                self._strangers[connected] = None
            thread = threading.Thread(
                target=self._attend,
                args=(connected, joined_address(*found[:2])),
                name=f"stoker-{self._purpose}",
                daemon=True,
            )
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _attend(self, connected: socket.socket, peer: str) -> None:
        try:
            self._serve_one(self._authenticated(connected, peer))
        except (EOFError, LinkError):
            pass  # a stranger, or it ended
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _authenticated(self, connected: socket.socket, peer: str) -> Link:
        try:
            link = Link.accept(
                connected,
                peer,
                self._token,
                self._purpose,
                timeout_s=_PROVE_S,
                tls=self._tls,
                insecure=self._insecure,
            )
        finally:
            with self._lock:
                self._strangers.pop(connected, None)
        link.set_timeout(self._timeout_s)
        return link

    def _serve_one(self, link: Link) -> None:
        with self._lock:
            self._links.add(link)
        try:
            if not self._is_closed:
                self._serve(link)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()
