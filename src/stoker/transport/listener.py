"""Accepting connections from processes of the same cluster."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from stoker.basics import process
from stoker.basics.future import start_thread
from stoker.transport.link import Link, LinkError, join_address
from stoker.transport.secret import Secret

# How long a client may take to prove that it belongs to the cluster. bench/results/encryption.json:
# connecting takes at most 20 ms, on a busy machine too.
_AUTHENTICATE_S = 2.0
# Connections at a time that have not proved it yet; a further one closes the oldest. Small beside
# the usual limit of 1,024 descriptors.
_MAX_UNAUTHENTICATED = 64
# How long closing waits for threads. A user would wait so long without an explanation. Chosen, not
# measured.
_JOIN_S = 5.0


class Listener:
    """Accepts connections on one interface, and serves each in a separate thread.

    Args:
        host: the address of the interface; ``0.0.0.0`` for all interfaces.
        port: the port; 0 for any free one.
        secret: that of the cluster.
        purpose: the name of the service.
        serve: called with each authenticated connection, in the connection's thread. The connection
            is closed when the call returns or raises. An exception that is not LinkError or
            EOFError is reported like any thread's.
        timeout_s: the connections' longest silence within a frame, in seconds.

    Raises OSError if the address is not free, TokenError if certificate files cannot be used,
    ImportError if cryptography is missing.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        purpose: str,
        serve: Callable[[Link], None],
        *,
        timeout_s: float = 30.0,
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        self._serve = serve
        self._timeout_s = timeout_s
        secret.context(server=True)  # raise what it raises now, not in a connection's thread
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._threads: set[threading.Thread] = set()
        self._unauthenticated: dict[Link, None] = {}  # a dict keeps order: oldest first
        self._is_closed = False
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # All jobs or nodes may connect at once. 128 is the most that kernels before 5.4 take.
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        process.close_in_children(self._socket)
        self.address = join_address(host, self._socket.getsockname()[1])
        """``host:port``, with the actual port."""
        self._thread = start_thread(f"stoker-{purpose}-accept", self._accept)

    def close(self) -> None:
        """Stop accepting, end all connections, and wait up to 5 s for their threads."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        with self._lock:
            links, threads = [*self._links, *self._unauthenticated], list(self._threads)
        for link in links:
            link.close()
        until_s = time.monotonic() + _JOIN_S
        for thread in (self._thread, *threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, address = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.05)  # out of descriptors: let clients wait, and do not spin
                continue
            thread = threading.Thread(
                target=self._serve_connection,
                args=(client, join_address(*address[:2])),
                name=f"stoker-{self._purpose}",
                daemon=True,
            )
            with self._lock:
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # no more threads for now
                client.close()
                with self._lock:
                    self._threads.discard(thread)
                time.sleep(0.05)

    def _serve_connection(self, client: socket.socket, peer: str) -> None:
        try:
            link = Link.of_client(client, peer, self._secret, timeout_s=self._timeout_s)
            self._authenticate(link)
            self._serve_link(link)
        except (EOFError, LinkError):
            pass  # a client without the token, or the connection ended
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _authenticate(self, link: Link) -> None:
        with self._lock:
            if len(self._unauthenticated) == _MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                oldest.close()  # wakes its thread, which gives it up
            self._unauthenticated[link] = None
        try:
            link.authenticate(self._secret, self._purpose, _AUTHENTICATE_S)
        finally:
            with self._lock:
                self._unauthenticated.pop(link, None)

    def _serve_link(self, link: Link) -> None:
        with self._lock:
            self._links.add(link)
        try:
            if not self._is_closed:
                self._serve(link)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()
