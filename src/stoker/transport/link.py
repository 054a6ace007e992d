"""An authenticated connection between hosts that carries frames in both directions.

Any process with the cluster's token may connect. Each end proves that it has the token: it answers
the other's random nonce with an HMAC before any other byte is read. The HMAC covers the mode that
the listener chose: encrypted, within a host, or plain because its user trusts the network. So an
attacker between the hosts cannot weaken the encryption.

A frame is a short header and a body of any length. The header carries a keyed digest of itself and
of its number on this connection. So a frame of another connection ends this one, and so does a
frame that is missing, doubled or out of order, encrypted or not. Callers check the body themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from stoker.basics import process
from stoker.basics.signals import finalize
from stoker.transport.tls import token_context

if TYPE_CHECKING:
    import ssl

    from stoker.transport.tls import EncryptedSocket, Tls


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


# The most that this side allocates for a peer's header. The largest one in use, 2**14 cache keys of
# 16 bytes, takes 256 KiB.
MAX_HEADER_BYTES = 16 << 20
# More than a useful item or batch has, so that a damaged or hostile frame cannot ask for more.
# Chosen, not measured.
MAX_BODY_BYTES = 4 << 30

_GREETING = b"stoker\x00\x02"  # the last byte is the version of the protocol
# 256 random bits: the same nonce never comes twice.
_NONCE_BYTES = 32
# SHA-256, as long as the token: guessing a proof is no easier than guessing the token.
_PROOF_BYTES = 32
_WELCOME = b"\x01"
_DIRECTIONS = (b"connects", b"listens")
_MAGIC = b"STKF"
_PREFIX = struct.Struct("<4sIQ")  # magic, header bytes, body bytes; the digest follows
# 128 bits are enough for a header: a wrong digest ends the connection, so a forger has one try.
_DIGEST_BYTES = 16
# The listener's choice for a connection: encrypted by the token, encrypted by certificates, plain
# because it stays within this host, plain because the user trusts the network.
_MODE_TOKEN = b"t"
_MODE_CERTIFICATES = b"c"
_MODE_WITHIN_HOST = b"h"
_MODE_INSECURE = b"i"
# Buffers for one sendmsg(); the kernel takes up to 1,024 (IOV_MAX).
_MAX_PARTS = 1_000

Socket: TypeAlias = "socket.socket | EncryptedSocket"
Buffer = bytes | bytearray | memoryview | np.ndarray
Allocate = Callable[[bytes, int], memoryview]
"""Takes a frame's header and its body's size in bytes; returns writable memory for the body."""


class LinkError(OSError):
    """A connection failed or ended. The peer may or may not have carried out the last request."""


class LinkRefused(LinkError):
    """The peer belongs to another cluster or runs another version. A retry does not help."""


class Keys(NamedTuple):
    """The keys for frame digests, one for each direction."""

    sending: bytes
    receiving: bytes


class Link:
    """A connection to a process of the same cluster.

    One thread at a time may send, and one may receive. An exception in the middle of a frame ends
    the connection: nobody could tell where the next frame begins.

    Args:
        connected: a socket whose peer has proved that it has the token.
        peer: the peer's address.
        timeout_s: the longest silence within a frame, in seconds.
        keys: the keys of this connection; by default none, for sockets that no other process can
            reach.
    """

    def __init__(
        self, connected: Socket, peer: str, timeout_s: float, keys: Keys | None = None
    ) -> None:
        self.peer = peer
        self._socket = connected
        self._keys = keys or Keys(b"", b"")
        self._sent_count = self._received_count = 0  # frames
        self.set_timeout(timeout_s)
        # A link that nobody closed would keep its peer waiting until the interpreter ends.
        finalize(self, connected.close)

    @classmethod
    def connect(
        cls, address: str, token: bytes, purpose: str, *, timeout_s: float, tls: Tls | None = None
    ) -> Link:
        """Connect to a `Listener`.

        Args:
            address: ``host:port``.
            token: the cluster's secret.
            purpose: the name of the service; the listener must have the same.
            timeout_s: for the connection as a whole, then the longest silence within a frame.
            tls: certificates of this host; the listener must then have certificates, too. None: the
                token encrypts.

        Raises LinkError, or LinkRefused if a retry cannot help; ValueError for an invalid address;
        TokenError for unusable certificate files.
        """
        host, port = split_address(address)
        contexts = _contexts(token, tls, host, server=False)
        until_s = time.monotonic() + timeout_s
        try:
            sock = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise LinkError(f"{address} does not answer: {error}") from error
        return _handshake(
            sock,
            address,
            timeout_s,
            until_s,
            lambda: _client_handshake(sock, token, purpose.encode(), until_s, address, contexts),
        )

    @classmethod
    def accept(
        cls,
        connected: socket.socket,
        peer: str,
        token: bytes,
        purpose: str,
        *,
        timeout_s: float,
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> Link:
        """Authenticate a connected client, as a `Listener` does.

        Raises LinkError.
        """
        until_s = time.monotonic() + timeout_s
        contexts = _contexts(token, tls, connected.getsockname()[0], server=True)
        return _handshake(
            connected,
            peer,
            timeout_s,
            until_s,
            lambda: _server_handshake(
                connected, token, purpose.encode(), until_s, contexts, insecure
            ),
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest silence within a frame, in seconds, before it is sent or received."""
        self._socket.settimeout(timeout_s)

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
            _send_all(self._socket, [memoryview(self._next_header(header, body_bytes)), *views])

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
        if not self._wait_for_frame(wait_s):
            raise TimeoutError(f"{self.peer} has sent nothing for {wait_s:g} s")
        with self._closed_by_errors():
            return self._receive_frame(allocate)

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError) or isinstance(error, LinkError):
                raise
            raise LinkError(f"the connection to {self.peer} ended: {error}") from error

    def close(self) -> None:
        """End the connection, from any thread; a waiting `receive` raises.

        The socket itself is closed when this object is freed: its descriptor must not be reused
        while a thread may still wait for it.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _next_header(self, header: bytes, body_bytes: int) -> bytes:
        prefix = _PREFIX.pack(_MAGIC, len(header), body_bytes)
        digest = _digest(self._keys.sending, self._sent_count, prefix, header)
        self._sent_count += 1
        return prefix + digest + header

    def _wait_for_frame(self, wait_s: float | None) -> bool:
        if not isinstance(self._socket, socket.socket) and self._socket.pending():
            return True
        number = self._socket.fileno()
        if number < 0:
            raise LinkError(f"the connection to {self.peer} belongs to another process")
        waiting = select.poll()
        waiting.register(number, select.POLLIN)
        return bool(waiting.poll(None if wait_s is None else wait_s * 1e3))

    def _receive_frame(self, allocate: Allocate | None) -> tuple[bytes, memoryview]:
        head = bytearray(_PREFIX.size + _DIGEST_BYTES)
        count = self._socket.recv_into(head)
        if not count:
            raise EOFError(f"{self.peer} closed the connection")
        _receive_into(self._socket, memoryview(head)[count:])
        prefix, received_digest = bytes(head[: _PREFIX.size]), bytes(head[_PREFIX.size :])
        magic, header_bytes, body_bytes = _PREFIX.unpack(prefix)
        if magic != _MAGIC or header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise LinkError(f"{self.peer} sent bytes that are not a frame")
        header = bytearray(header_bytes)
        _receive_into(self._socket, memoryview(header))
        digest = _digest(self._keys.receiving, self._received_count, prefix, header)
        if not hmac.compare_digest(received_digest, digest):
            raise LinkError(f"{self.peer} sent a frame that is damaged, out of order or forged")
        self._received_count += 1
        if allocate is None:
            body = _byte_view(np.empty(body_bytes, np.uint8))
        else:
            body = allocate(bytes(header), body_bytes)
        _receive_into(self._socket, body)
        return bytes(header), body


def _byte_view(memory: Buffer) -> memoryview:
    return memoryview(memory)  # type: ignore[arg-type]  # arrays have buffers; Python 3.11 has no name for that


def _digest(key: bytes, number: int, prefix: bytes, header: bytes | bytearray) -> bytes:
    """Return a digest that binds a header to its connection, direction and number."""
    hashed = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=_DIGEST_BYTES)
    hashed.update(prefix)
    hashed.update(header)
    return hashed.digest()


class _Contexts(NamedTuple):
    """The TLS contexts of a connection."""

    by_certificates: ssl.SSLContext | None
    by_token: Callable[[], ssl.SSLContext]


def _contexts(token: bytes, tls: Tls | None, host: str, *, server: bool) -> _Contexts:
    """Return the contexts for either mode of encryption. Raises TokenError."""
    if tls is None and not _is_loopback(host):
        # Making the certificate takes 20 ms (bench/results/encryption.json): do it before a peer
        # waits.
        token_context(token, server=server)
    return _Contexts(
        None if tls is None else tls.context(server=server),
        lambda: token_context(token, server=server),
    )


class _Session(NamedTuple):
    """The connection after a handshake."""

    mode: bytes
    """One of ``_MODE_...``."""
    context: ssl.SSLContext | None
    """The TLS context; None: the connection is not encrypted."""
    keys: Keys
    is_listening: bool


def _handshake(
    sock: socket.socket,
    peer_name: str,
    timeout_s: float,
    until_s: float,
    handshake: Callable[[], _Session],
) -> Link:
    """Authenticate both ends, and encrypt the connection unless the mode says otherwise."""
    connected: Socket = sock
    session: _Session | None = None
    process.close_in_children(sock)
    try:
        sock.settimeout(max(1e-3, until_s - time.monotonic()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Without keepalive, a side that only waits would never notice that the peer's host is gone.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        session = handshake()
        if session.context is not None:
            from stoker.transport.tls import EncryptedSocket  # here: importing ssl takes time

            connected = EncryptedSocket(
                sock, session.context, server_side=session.is_listening, until_s=until_s
            )
        if session.is_listening:
            connected.sendall(_WELCOME)
        else:  # if the listener refuses this side's proof, it closes the connection instead
            _receive_exactly(connected, len(_WELCOME), until_s)
    except BaseException as error:
        sock.close()
        if isinstance(error, EOFError):
            raise LinkError(f"{peer_name} refused the connection") from error
        if not isinstance(error, OSError) or isinstance(error, LinkError):
            raise
        if session is not None and session.context is not None:
            from stoker.transport.tls import rejection_reason

            reason = rejection_reason(error)
            if reason and session.mode == _MODE_TOKEN:
                raise LinkError(
                    f"a host without the token answers in place of {peer_name}: {reason}"
                ) from error
            if reason:
                raise LinkRefused(f"{peer_name} refused the connection: {reason}") from error
        raise LinkError(f"{peer_name} did not complete the connection: {error}") from error
    return Link(connected, peer_name, timeout_s, session.keys)


def _client_handshake(
    sock: socket.socket,
    token: bytes,
    purpose: bytes,
    until_s: float,
    address: str,
    contexts: _Contexts,
) -> _Session:
    """Prove that this end has the token, and check the listener's proof."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_GREETING + bytes([len(purpose)]) + purpose + nonce)
    try:
        answer = _receive_exactly(sock, len(_GREETING) + 1 + _NONCE_BYTES + _PROOF_BYTES, until_s)
    except EOFError as error:
        raise LinkError(
            f"{address} refused the connection: no {purpose.decode()} of this version listens there"
        ) from error
    if not answer.startswith(_GREETING):
        raise LinkRefused(f"no {purpose.decode()} of this version listens at {address}")
    mode, peer_nonce = answer[len(_GREETING) :][:1], answer[len(_GREETING) + 1 : -_PROOF_BYTES]
    transcript = mode + purpose + b"\x00" + nonce + peer_nonce
    if not hmac.compare_digest(answer[-_PROOF_BYTES:], _hmac(token, b"listens", transcript)):
        raise LinkRefused(
            f"{address} has another token, so it belongs to another cluster. Copy the token file "
            "of one host to all hosts of the cluster"
        )
    context = _client_context(mode, contexts, sock, address)
    sock.sendall(_hmac(token, b"connects", transcript))
    sending_key, receiving_key = (
        _hmac(token, b"frames of the side that " + side, transcript) for side in _DIRECTIONS
    )
    return _Session(mode, context, Keys(sending_key, receiving_key), is_listening=False)


def _client_context(
    mode: bytes, contexts: _Contexts, sock: socket.socket, address: str
) -> ssl.SSLContext | None:
    """Return the TLS context for the mode that the listener chose; None for no encryption.

    Raises LinkRefused if this host does not accept that mode.
    """
    if mode == _MODE_CERTIFICATES:
        if contexts.by_certificates is None:
            raise LinkRefused(
                f"{address} encrypts connections with certificates, but this host has none. Put "
                "certificate.pem, key.pem and authority.pem into ~/.config/stoker/tls, or set "
                "STOKER_TLS_FOLDER to their folder"
            )
        return contexts.by_certificates
    if contexts.by_certificates is not None:
        raise LinkRefused(
            f"{address} does not encrypt connections with certificates (TLS), but this host does. "
            "Give both hosts certificates, or neither"
        )
    if mode == _MODE_TOKEN:
        return contexts.by_token()
    if mode not in (_MODE_WITHIN_HOST, _MODE_INSECURE):
        raise LinkRefused(f"{address} runs another version of stoker")
    if mode == _MODE_WITHIN_HOST and not within_host(sock):
        raise LinkRefused(
            f"{address} offers an unencrypted connection, as for a client on its own host. A proxy "
            "or tunnel there probably forwards the connection. Connect to the address at which the "
            "process listens"
        )
    return None


def _server_handshake(
    sock: socket.socket,
    token: bytes,
    purpose: bytes,
    until_s: float,
    contexts: _Contexts,
    insecure: bool,
) -> _Session:
    """Check a client's proof that it has the token, and prove it in turn."""
    context = None
    if contexts.by_certificates is not None:
        mode, context = _MODE_CERTIFICATES, contexts.by_certificates
    elif insecure:
        mode = _MODE_INSECURE
    elif within_host(sock):
        mode = _MODE_WITHIN_HOST
    else:
        mode, context = _MODE_TOKEN, contexts.by_token()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    expected = _GREETING + bytes([len(purpose)]) + purpose
    try:
        if _receive_exactly(sock, len(expected), until_s) != expected:
            raise LinkError("a client asked for another service or version")
        peer_nonce = _receive_exactly(sock, _NONCE_BYTES, until_s)
        transcript = mode + purpose + b"\x00" + peer_nonce + nonce
        sock.sendall(_GREETING + mode + nonce + _hmac(token, b"listens", transcript))
        proof = _receive_exactly(sock, _PROOF_BYTES, until_s)
    except EOFError as error:
        raise LinkError("a client left before it proved that it has the token") from error
    if not hmac.compare_digest(proof, _hmac(token, b"connects", transcript)):
        raise LinkError("a client does not have the token")
    receiving_key, sending_key = (
        _hmac(token, b"frames of the side that " + side, transcript) for side in _DIRECTIONS
    )
    return _Session(mode, context, Keys(sending_key, receiving_key), is_listening=True)


def _hmac(token: bytes, use: bytes, transcript: bytes) -> bytes:
    """Return 32 keyed bytes for one use on one connection.

    ``transcript`` is what both ends have seen: mode, purpose and both nonces.
    """
    return hmac.digest(token, use + b"\x00" + transcript, "sha256")


def within_host(connected: socket.socket) -> bool:
    """True if a connection stays within this host: over loopback, or from an address to itself.

    Operating systems do not send packets for their own addresses to the network, and they drop
    packets from the network that claim such an address. So nobody outside can read or forge them.
    """
    own_host, peer_host = connected.getsockname()[0], connected.getpeername()[0]
    return own_host == peer_host or (_is_loopback(own_host) and _is_loopback(peer_host))


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a host name
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _receive_exactly(sock: Socket, size: int, until_s: float) -> bytes:
    """Receive ``size`` bytes before a deadline.

    Raises EOFError with the bytes received so far if the connection ends, TimeoutError at the
    deadline, and other OSErrors.
    """
    data = bytearray()
    while len(data) < size:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the peer did not answer in time")
        sock.settimeout(left_s)
        try:
            part = sock.recv(size - len(data))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError(bytes(data))
        data += part
    return bytes(data)


def _receive_into(sock: Socket, into: memoryview) -> None:
    if into.nbytes:  # memoryview cannot cast zero bytes
        into = into.cast("B")
    while into.nbytes:
        count = sock.recv_into(into)
        if not count:
            raise LinkError("the connection ended in the middle of a frame")
        into = into[count:]


def _send_all(sock: Socket, parts: list[memoryview]) -> None:
    first = 0
    while first < len(parts):
        sent = sock.sendmsg(parts[first : first + _MAX_PARTS])
        while first < len(parts) and sent >= parts[first].nbytes:
            sent -= parts[first].nbytes
            first += 1
        if sent:
            parts[first] = parts[first][sent:]
