"""An authenticated connection between hosts that carries frames in both directions.

TLS 1.3 encrypts it, and each end shows a certificate that only processes of the cluster have
(``transport/secret.py``). Then each end proves that it has the cluster's token, by an HMAC of both
ends' random nonces, before a frame is read. Without encryption (``insecure=True`` at both ends)
that proof is all: frames can then be read and changed on their way.

A frame is a short header and a body of any length. Addresses are texts: ``host:port``, or
``[host]:port`` for IPv6.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from stoker.basics import process
from stoker.basics.signals import finalize
from stoker.transport.secret import Secret, another_token

# The most that this side allocates for a peer's header. The largest one in use, 2**14 cache keys of
# 16 bytes, takes 256 KiB.
MAX_HEADER_BYTES = 16 << 20
# More than a useful item or batch has, so that a damaged or hostile frame cannot ask for more.
# Chosen, not measured.
MAX_BODY_BYTES = 4 << 30

_VERSION = b"stoker\x00\x03"  # the last byte is the version of the protocol
_PURPOSE_BYTES = 16
# 256 random bits: the same nonce never comes twice.
_NONCE_BYTES = 32
# SHA-256, as long as the token: guessing a proof is no easier than guessing the token.
_PROOF_BYTES = 32
_HELLO = struct.Struct(f"<{len(_VERSION)}s{_PURPOSE_BYTES}s{_NONCE_BYTES}s")
_WELCOME = b"\x01"
_PREFIX = struct.Struct("<4sIQ")  # magic, header bytes, body bytes
_MAGIC = b"STKF"
# Smaller parts are joined before they are sent: each call makes a TLS record. With 64 parts of 3 KB
# that halves the processor time.
_JOINED_BYTES = 1 << 16
# The most that is encrypted at a time: a thread that receives waits for that.
_PIECE_BYTES = 1 << 18

# How long a refused peer may take to read why. Chosen, not measured.
_REFUSED_S = 0.5

_INSECURE_HINT = ": if it encrypts connections, leave out insecure=True here"

Buffer = bytes | bytearray | memoryview | np.ndarray
Allocate = Callable[[bytes, int], memoryview]
"""Takes a frame's header and its body's size in bytes; returns writable memory for the body."""
T = TypeVar("T")


class LinkError(OSError):
    """A connection failed or ended. The peer may or may not have carried out the last request."""


class LinkRefused(LinkError):
    """The peer belongs to another cluster or runs another version. A retry does not help."""


class Link:
    """A connection to a process of the same cluster.

    One thread at a time may send, and one may receive. An exception in the middle of a frame ends
    the connection: nobody could tell where the next frame begins.

    Args:
        connected: a socket that no other process can reach, or whose peer is authenticated next.
        peer: the peer's address.
        timeout_s: the longest silence within a frame, in seconds.
    """

    def __init__(self, connected: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._socket = connected
        self._timeout_s = timeout_s
        self._handshake_until_s = float("inf")
        # Before Python 3.13, no two threads may use one SSLSocket at once. So the socket never
        # blocks, and no thread holds this lock while it waits for the network.
        self._lock = threading.Lock()
        connected.setblocking(False)
        process.close_in_children(connected)
        # A link that nobody closed would keep its peer waiting until the interpreter ends.
        finalize(self, connected.close)

    @classmethod
    def connect(cls, address: str, secret: Secret, purpose: str, *, timeout_s: float) -> Link:
        """Connect to a `Listener`.

        Args:
            address: ``host:port``.
            secret: that of the cluster.
            purpose: the name of the service, up to 16 letters; the listener must have the same.
            timeout_s: for the connection as a whole, then the longest silence within a frame.

        Raises LinkError, or LinkRefused if a retry cannot help; ValueError for an invalid address;
        TokenError for unusable certificate files; ImportError if cryptography is missing.
        """
        host, port = split_address(address)
        context = secret.context(server=False)  # takes long the first time
        until_s = time.monotonic() + timeout_s
        try:
            connected = socket.create_connection((host, port), timeout_s)
        except (OSError, UnicodeError) as error:  # a name such as 10.0.0..5 is no name
            raise LinkError(f"{address} does not answer: {error}") from error
        link = cls(_prepare(connected, address, context, server=False), address, timeout_s)
        with link._handshake(secret, until_s):
            link._greet_listener(secret, purpose)
        return link

    @classmethod
    def of_client(
        cls, connected: socket.socket, peer: str, secret: Secret, *, timeout_s: float
    ) -> Link:
        """Return a client's connection, for a `Listener`: it must call ``authenticate`` next.

        Raises LinkError; TokenError and ImportError as ``connect`` does.
        """
        context = secret.context(server=True)
        return cls(_prepare(connected, peer, context, server=True), peer, timeout_s)

    def authenticate(self, secret: Secret, purpose: str, timeout_s: float) -> None:
        """Check that the client belongs to the cluster, within ``timeout_s``. Raises LinkError."""
        with self._handshake(secret, time.monotonic() + timeout_s):
            self._greet_client(secret, purpose)

    def send(self, header: bytes, *parts: Buffer) -> None:
        """Send a frame; its body is all parts, one after another.

        Raises LinkError.
        """
        views = [view.cast("B") for view in map(_byte_view, parts) if view.nbytes]
        body_bytes = sum(view.nbytes for view in views)
        if len(header) > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise ValueError(
                f"a frame may have a header of {MAX_HEADER_BYTES} bytes and a body of "
                f"{MAX_BODY_BYTES} bytes at most, but these have {len(header)} and {body_bytes}"
            )
        with self._closed_by_errors():
            joined = bytearray(_PREFIX.pack(_MAGIC, len(header), body_bytes) + header)
            for view in views:
                if view.nbytes < _JOINED_BYTES:
                    joined += view
                    if len(joined) < _JOINED_BYTES:
                        continue
                self._send_all(joined)
                joined = bytearray()
                if view.nbytes >= _JOINED_BYTES:
                    self._send_all(view)
            self._send_all(joined)

    def receive(
        self, allocate: Allocate | None = None, *, wait_s: float | None = None
    ) -> tuple[bytes, memoryview]:
        """Return header and body of the next frame.

        Args:
            allocate: returns memory for the body; by default new memory, owned by the caller.
            wait_s: how long to wait for a frame to begin, in seconds; None: for ever.

        Raises TimeoutError if no frame begins in that time (the connection stays usable); EOFError
        if the peer closed the connection after a whole frame; LinkError.
        """
        if not self._has_decrypted() and not self._poll(select.POLLIN, wait_s):
            raise TimeoutError(f"{self.peer} has sent nothing for {wait_s:g} s")
        with self._closed_by_errors():
            return self._receive_frame(allocate)

    def end_when_silent(self, timeout_s: float) -> None:
        """Have the system end the connection once the peer's host was silent for so long.

        A host that lost its power or its network says nothing. For a process that is only busy or
        stopped the system answers, unless more was sent to it than the system keeps.
        """
        probe_s = max(1, int(timeout_s / 4))
        options = {"TCP_KEEPIDLE": probe_s, "TCP_KEEPINTVL": probe_s, "TCP_KEEPCNT": 3}
        options["TCP_USER_TIMEOUT"] = int(timeout_s * 1e3)
        for name, value in options.items():
            if hasattr(socket, name):  # not on all systems
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close(self) -> None:
        """End the connection, from any thread; a waiting `receive` raises.

        The socket itself is closed when this object is freed: its descriptor must not be reused
        while a thread may still wait for it.
        """
        with contextlib.suppress(OSError):
            # Not SSLSocket's own method, after which a thread that receives would get the
            # encrypted bytes.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError) or isinstance(error, LinkError):
                raise
            raise LinkError(f"the connection to {self.peer} ended: {error}") from error

    @contextlib.contextmanager
    def _handshake(self, secret: Secret, until_s: float) -> Iterator[None]:
        """Encrypt the connection before the block, and close it if that or the block fails."""
        self._handshake_until_s = until_s
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                self._run(self._socket.do_handshake, select.POLLIN)
            yield
        except BaseException as error:
            if isinstance(error, ssl.SSLError):
                self._let_peer_read()
            self._socket.close()
            if isinstance(error, (EOFError, ConnectionError, ssl.SSLEOFError)):
                hint = "" if isinstance(self._socket, ssl.SSLSocket) else _INSECURE_HINT
                raise LinkError(f"{self.peer} refused the connection{hint}") from error
            if not isinstance(error, OSError) or isinstance(error, LinkError):
                raise
            reason = secret.refusal(error, self.peer)
            if reason is not None:
                raise LinkRefused(reason) from error
            raise LinkError(f"{self.peer} did not complete the connection: {error}") from error
        self._handshake_until_s = float("inf")

    def _let_peer_read(self) -> None:
        """Take bytes until the peer ends: closing before resets, and the alert sent is lost."""
        until_s = time.monotonic() + _REFUSED_S
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while self._poll(select.POLLIN, max(0.0, until_s - time.monotonic())):
                if not socket.socket.recv(self._socket, _JOINED_BYTES):
                    break

    def _greet_listener(self, secret: Secret, purpose: str) -> None:
        """Check the listener's proof, then prove that this end has the token."""
        nonce, service = secrets.token_bytes(_NONCE_BYTES), purpose.encode()
        self._send_all(_HELLO.pack(_VERSION, service, nonce))
        version, its_service, its_nonce = _HELLO.unpack(self._receive_exactly(_HELLO.size))
        if version != _VERSION or its_service.rstrip(b"\x00") != service:
            raise LinkRefused(f"no {purpose} of this version listens at {self.peer}")
        transcript = its_service + nonce + its_nonce
        proof = self._receive_exactly(_PROOF_BYTES)
        if not hmac.compare_digest(proof, secret.proof(b"listens", transcript)):
            raise LinkRefused(another_token(self.peer))
        self._send_all(secret.proof(b"connects", transcript))
        self._receive_exactly(len(_WELCOME))

    def _greet_client(self, secret: Secret, purpose: str) -> None:
        """Prove that this end has the token, then check the client's proof."""
        version, service, its_nonce = _HELLO.unpack(self._receive_exactly(_HELLO.size))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = _HELLO.pack(_VERSION, purpose.encode(), nonce)
        if not hello.startswith(version + service):
            self._send_all(hello)  # the client tells its user
            raise LinkError("a client asked for another service or version")
        transcript = service + its_nonce + nonce
        self._send_all(hello + secret.proof(b"listens", transcript))
        proof = self._receive_exactly(_PROOF_BYTES)
        if not hmac.compare_digest(proof, secret.proof(b"connects", transcript)):
            raise LinkError("a client does not have the token")
        self._send_all(_WELCOME)

    def _has_decrypted(self) -> bool:
        """True if bytes wait that the network no longer shows, as OpenSSL has taken them."""
        if not isinstance(self._socket, ssl.SSLSocket) or self._socket.fileno() < 0:
            return False
        with self._lock:
            return self._socket.pending() > 0

    def _receive_frame(self, allocate: Allocate | None) -> tuple[bytes, memoryview]:
        prefix = bytearray(_PREFIX.size)
        count = self._receive_some(memoryview(prefix))
        if not count:
            raise EOFError(f"{self.peer} closed the connection")
        self._receive_into(memoryview(prefix)[count:])
        magic, header_bytes, body_bytes = _PREFIX.unpack(prefix)
        if magic != _MAGIC or header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise LinkError(f"{self.peer} sent bytes that are not a frame")
        header = self._receive_exactly(header_bytes)
        if allocate is None:
            body = _byte_view(np.empty(body_bytes, np.uint8))
        else:
            body = allocate(header, body_bytes)
        self._receive_into(body)
        return header, body

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self._receive_into(memoryview(data))
        return bytes(data)

    def _receive_into(self, into: memoryview) -> None:
        if into.nbytes:  # memoryview cannot cast zero bytes
            into = into.cast("B")
        while into.nbytes:
            count = self._receive_some(into)
            if not count:
                raise ConnectionError("the peer closed it in the middle of a message")
            into = into[count:]

    def _receive_some(self, into: memoryview) -> int:
        return self._run(lambda: self._socket.recv_into(into), select.POLLIN)

    def _send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            send_piece = functools.partial(self._socket.send, view[:_PIECE_BYTES])
            view = view[self._run(send_piece, select.POLLOUT) :]

    def _run(self, operation: Callable[[], T], event: int) -> T:
        """Run an operation of the socket, again after each ``event`` that it has to wait for."""
        while True:
            try:
                with self._lock:
                    return operation()
            except ssl.SSLWantReadError:  # of TLS, sending may have to receive first
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except BlockingIOError:
                pass
            wait_s = min(self._timeout_s, self._handshake_until_s - time.monotonic())
            if wait_s <= 0 or not self._poll(event, wait_s):
                raise TimeoutError("it does not answer in time")

    def _poll(self, event: int, wait_s: float | None) -> bool:
        """Wait for the network; False if nothing happened in that time."""
        number = self._socket.fileno()
        if number < 0:
            raise LinkError(f"the connection to {self.peer} belongs to another process")
        waiting = select.poll()
        waiting.register(number, event)
        return bool(waiting.poll(None if wait_s is None else wait_s * 1e3))


def _prepare(
    connected: socket.socket, peer: str, context: ssl.SSLContext | None, *, server: bool
) -> socket.socket:
    """Set a new connection's options, and wrap it for TLS; nothing is sent yet.

    Raises LinkError.
    """
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Without keepalive, a side that only waits would never notice that the peer's host is gone.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if context is None:
            return connected
        return context.wrap_socket(connected, server_side=server, do_handshake_on_connect=False)
    except OSError as error:
        connected.close()
        raise LinkError(f"{peer} ended the connection: {error}") from error


def _byte_view(memory: Buffer) -> memoryview:
    return memoryview(memory)  # type: ignore[arg-type]  # arrays have buffers; Python 3.11 has no name for that


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, or of ``[host]:port`` with an IPv6 address.

    Raises ValueError for other texts.
    """
    host, separator, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (separator and host and is_port) or (":" in host and not is_bracketed):
        raise ValueError(
            f"an address must be host:port, or [host]:port for IPv6, but it is {address!r}"
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_host_towards(host: str) -> str:
    """Return this host's address on the interface that leads to another host.

    Nothing is sent. Raises OSError if there is no such interface.
    """
    # Any port will do (9 is "discard"): connecting a datagram socket sends nothing.
    family, _, _, _, address_there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address_there)
        return str(probe.getsockname()[0])
