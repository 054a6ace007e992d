"""An authenticated connection between hosts: encrypted frames in both directions. Where a process
listens: ``host:port``.

A process with the cluster's token may connect. Both ends prove that they have the token: each
answers the other's random challenge by HMAC, before any other byte is read. The answer includes the
listener's mode of the connection: encrypted, within a host, or plain because its user trusts the
network. So an attacker on the way cannot weaken the encryption.

A frame is a header of a few bytes and a body of any length. The header carries a keyed digest of
itself and of its place on this connection: a frame of another connection, or a frame that was left
out, doubled or moved, ends it, plain or not. Checking the body is the caller's task.
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
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from stoker.basics import process
from stoker.transport.tls import token_context

if TYPE_CHECKING:
    import ssl

    from stoker.transport.tls import EncryptedSocket, Tls


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, or ``[host]:port`` with an address of IPv6.

    Raises ValueError.
    """
    host, separator, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (separator and host and is_port) or (":" in host and not is_bracketed):
        raise ValueError(
            f"an address is host:port, or [host]:port with an address of IPv6, not {address!r}"
        )
    return host, int(port)


def joined_address(host: str, port: int) -> str:
    """Return ``host:port``, the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_host_towards(host: str) -> str:
    """Return this host's own address on the interface that leads to another host.

    Nothing is sent. Raises OSError if no interface does.
    """
    # Any port will do: connecting a datagram socket sends nothing.
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


# As much as this side allocates for a peer's header; 2**14 keys of 16 bytes take 256 KiB of it.
MAX_HEADER_BYTES = 16 << 20
# More than any item or batch of use has; a damaged or hostile frame asks for no more. Chosen, not
# measured.
MAX_BODY_BYTES = 4 << 30

_GREETING = b"stoker\x00\x02"  # the last byte: version of what follows
# 256 bits, as long as the digests that they go into: none comes twice.
_NONCE_BYTES = 32
# Of a keyed digest: as long as the token, so that guessing one is no easier than the other.
_PROOF_BYTES = 32
_WELCOME = b"\x01"
_SIDES = (b"connects", b"listens")
_MARK = b"STKF"
_FRONT = struct.Struct("<4sIQ")  # mark, bytes of the header, of the body; then their digest
# 128 bits of a header: a forger has one try, for the connection ends with a wrong one.
_DIGEST_BYTES = 16
# How a connection goes on, as the side that listens says.
_BY_TOKEN = b"t"
_BY_CERTIFICATES = b"c"
_WITHIN_HOST = b"h"
_INSECURE = b"i"
# Of one system call; the kernel takes 1,024.
_PARTS = 1_000

Socket: TypeAlias = "socket.socket | EncryptedSocket"
Buffer = bytes | bytearray | memoryview | np.ndarray
Place = Callable[[bytes, int], memoryview]
"""Returns writable memory for a body, by the frame's header and the body's bytes."""


class LinkError(OSError):
    """A connection cannot be made or has ended; the last request may or may not have been done."""


class LinkRefused(LinkError):
    """The other end belongs to another cluster or version: retrying does not help."""


class Keys(NamedTuple):
    """The keys of frame digests, one for each direction."""

    sending: bytes
    receiving: bytes


class Link:
    """A connection to a process of the same cluster.

    One thread at a time may send, and one receive. An exception in the middle of a frame ends the
    connection: what follows could not be told from the rest of that frame.

    Args:
        connected: a socket whose other end has proved that it has the token.
        peer: the other side's address.
        timeout_s: the longest silence within a frame, in seconds.
        keys: this connection's own keys; by default none, for sockets that no other process can
            reach.
    """

    def __init__(
        self, connected: Socket, peer: str, timeout_s: float, keys: Keys | None = None
    ) -> None:
        self.peer = peer
        self._socket = connected
        self._keys = keys or Keys(b"", b"")
        self._sent = self._received = 0  # frames
        self.set_timeout(timeout_s)
        # A connection that nobody closed would keep its peer waiting until the interpreter ends.
        weakref.finalize(self, connected.close)

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

        Raises LinkError, LinkRefused, ValueError for an invalid address; TokenError.
        """
        host, port = split_address(address)
        contexts = _contexts(token, tls, host, server=False)
        until = time.monotonic() + timeout_s
        try:
            made = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise LinkError(f"{address} does not answer: {error}") from error
        return _proven(
            made,
            address,
            timeout_s,
            until,
            lambda: _introduce(made, token, purpose.encode(), until, address, contexts),
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
        until = time.monotonic() + timeout_s
        contexts = _contexts(token, tls, connected.getsockname()[0], server=True)
        return _proven(
            connected,
            peer,
            timeout_s,
            until,
            lambda: _examine(connected, token, purpose.encode(), until, contexts, insecure),
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest silence within a frame, in seconds, before it is sent or received."""
        self._socket.settimeout(timeout_s)

    def send(self, header: bytes, *parts: Buffer) -> None:
        """Send a frame; its body is all parts, one after another.

        Raises LinkError.
        """
        views = [view.cast("B") for view in map(_view, parts) if view.nbytes]
        body_bytes = sum(view.nbytes for view in views)
        if len(header) > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise ValueError(
                f"a frame has a header of up to {MAX_HEADER_BYTES} bytes and a body of up to "
                f"{MAX_BODY_BYTES}, not {len(header)} and {body_bytes}"
            )
        try:
            _send_all(self._socket, [memoryview(self._head(header, body_bytes)), *views])
        except OSError as error:
            self.close()
            raise LinkError(f"the connection to {self.peer} ended: {error}") from error
        except BaseException:
            self.close()
            raise

    def receive(
        self, place: Place | None = None, *, wait_s: float | None = None
    ) -> tuple[bytes, memoryview]:
        """Return header and body of the next frame.

        Args:
            place: returns memory for the body; by default new memory, owned by the caller.
            wait_s: how long a frame may take to begin, in seconds; None: for ever.

        Raises TimeoutError if none begins in that time (the connection stays usable); EOFError if
        the other end closed it after a whole frame; LinkError.
        """
        if not self._begins(wait_s):
            raise TimeoutError(f"{self.peer} has sent nothing for {wait_s:g} s")
        try:
            return self._frame(place)
        except EOFError:
            self.close()
            raise
        except LinkError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise LinkError(f"the connection to {self.peer} ended: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection, from any thread; a waiting `receive` raises.

        The socket itself is closed with this object: its number must not be reused while a thread
        may still wait for it.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _head(self, header: bytes, body_bytes: int) -> bytes:
        front = _FRONT.pack(_MARK, len(header), body_bytes)
        digest = _digest(self._keys.sending, self._sent, front, header)
        self._sent += 1
        return front + digest + header

    def _begins(self, wait_s: float | None) -> bool:
        if not isinstance(self._socket, socket.socket) and self._socket.pending():
            return True
        number = self._socket.fileno()
        if number < 0:
            raise LinkError(f"the connection to {self.peer} is another process's")
        waiting = select.poll()
        waiting.register(number, select.POLLIN)
        return bool(waiting.poll(None if wait_s is None else wait_s * 1e3))

    def _frame(self, place: Place | None) -> tuple[bytes, memoryview]:
        head = bytearray(_FRONT.size + _DIGEST_BYTES)
        got = self._socket.recv_into(head)
        if not got:
            raise EOFError(f"{self.peer} closed the connection")
        _receive_all(self._socket, memoryview(head)[got:])
        front, found = bytes(head[: _FRONT.size]), bytes(head[_FRONT.size :])
        mark, header_bytes, body_bytes = _FRONT.unpack(front)
        if mark != _MARK or header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise LinkError(f"{self.peer} sent what is no frame")
        header = bytearray(header_bytes)
        _receive_all(self._socket, memoryview(header))
        digest = _digest(self._keys.receiving, self._received, front, header)
        if not hmac.compare_digest(found, digest):
            raise LinkError(f"{self.peer} sent a damaged frame, or it belongs elsewhere")
        self._received += 1
        if place is None:
            body = _view(np.empty(body_bytes, np.uint8))
        else:
            body = place(bytes(header), body_bytes)
        _receive_all(self._socket, body)
        return bytes(header), body


def _view(memory: Buffer) -> memoryview:
    return memoryview(memory)  # type: ignore[arg-type]  # arrays have buffers; Python 3.11 has no name for that


def _digest(key: bytes, place: int, front: bytes, header: bytes | bytearray) -> bytes:
    """Return a digest that binds a header to its connection, direction and position."""
    hashed = hashlib.blake2b(place.to_bytes(8, "little"), key=key, digest_size=_DIGEST_BYTES)
    hashed.update(front)
    hashed.update(header)
    return hashed.digest()


class _Contexts(NamedTuple):
    """The TLS contexts of a connection."""

    by_certificates: ssl.SSLContext | None
    by_token: Callable[[], ssl.SSLContext]


def _contexts(token: bytes, tls: Tls | None, host: str, *, server: bool) -> _Contexts:
    """Raises TokenError."""
    if tls is None and not _is_loopback(host):
        token_context(token, server=server)  # it takes time, and nobody waits yet
    return _Contexts(
        None if tls is None else tls.context(server=server),
        lambda: token_context(token, server=server),
    )


class _Terms(NamedTuple):
    """The agreed terms of a connection."""

    manner: bytes
    context: ssl.SSLContext | None
    """The TLS context; None: no encryption."""
    keys: Keys
    is_listening: bool


def _proven(
    made: socket.socket, who: str, timeout_s: float, until: float, prove: Callable[[], _Terms]
) -> Link:
    """Authenticate both ends, and encrypt the connection if agreed."""
    connected: Socket = made
    terms: _Terms | None = None
    process.close_in_children(made)
    try:
        made.settimeout(max(1e-3, until - time.monotonic()))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished is noticed where only this side waits.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        terms = prove()
        if terms.context is not None:
            from stoker.transport.tls import EncryptedSocket  # it takes time

            connected = EncryptedSocket(
                made, terms.context, server_side=terms.is_listening, until_s=until
            )
        if terms.is_listening:
            connected.sendall(_WELCOME)
        else:  # a refusal of what this side has shown comes here
            _received(connected, len(_WELCOME), until)
    except BaseException as error:
        made.close()
        if isinstance(error, EOFError):
            raise LinkError(f"{who} refused the connection") from error
        if not isinstance(error, OSError) or isinstance(error, LinkError):
            raise
        if terms is not None and terms.context is not None:
            from stoker.transport.tls import explained

            reason = explained(error)
            if reason and terms.manner == _BY_TOKEN:
                raise LinkError(
                    f"somebody without the token is in the way to {who}: {reason}"
                ) from error
            if reason:
                raise LinkRefused(f"{who} refused the connection: {reason}") from error
        raise LinkError(f"{who} does not complete the connection: {error}") from error
    return Link(connected, who, timeout_s, terms.keys)


def _introduce(
    to: socket.socket,
    token: bytes,
    purpose: bytes,
    until: float,
    address: str,
    contexts: _Contexts,
) -> _Terms:
    """Prove that this end has the token, and check the listener's proof."""
    challenge = secrets.token_bytes(_NONCE_BYTES)
    to.sendall(_GREETING + bytes([len(purpose)]) + purpose + challenge)
    try:
        answer = _received(to, len(_GREETING) + 1 + _NONCE_BYTES + _PROOF_BYTES, until)
    except EOFError as error:
        raise LinkError(
            f"{address} refused the connection: it is no {purpose.decode()} of this version"
        ) from error
    if not answer.startswith(_GREETING):
        raise LinkRefused(f"{address} is no {purpose.decode()} of this version")
    manner, theirs = answer[len(_GREETING) :][:1], answer[len(_GREETING) + 1 : -_PROOF_BYTES]
    session = manner + purpose + b"\x00" + challenge + theirs
    if not hmac.compare_digest(answer[-_PROOF_BYTES:], _keyed(token, b"listens", session)):
        raise LinkRefused(f"{address} has another token: it belongs to another cluster")
    context = _agreed(manner, contexts, to, address)
    to.sendall(_keyed(token, b"connects", session))
    ours, others = (_keyed(token, b"frames of who " + who, session) for who in _SIDES)
    return _Terms(manner, context, Keys(ours, others), is_listening=False)


def _agreed(
    manner: bytes, contexts: _Contexts, to: socket.socket, address: str
) -> ssl.SSLContext | None:
    """Return the TLS context for the listener's mode.

    Raises LinkRefused if this host does not accept that mode.
    """
    if manner == _BY_CERTIFICATES:
        if contexts.by_certificates is None:
            raise LinkRefused(
                f"{address} encrypts its connections with certificates: this host needs them, too, "
                "in ~/.config/stoker/tls or where STOKER_TLS_FOLDER says"
            )
        return contexts.by_certificates
    if contexts.by_certificates is not None:
        raise LinkRefused(
            f"{address} refused the connection: it does not encrypt its connections with "
            "certificates (TLS), and this host does"
        )
    if manner == _BY_TOKEN:
        return contexts.by_token()
    if manner not in (_WITHIN_HOST, _INSECURE):
        raise LinkRefused(f"{address} is of another version")
    if manner == _WITHIN_HOST and not within_host(to):
        raise LinkRefused(
            f"{address} takes this for a connection within its host, which is not encrypted: "
            "something there passes it on. Connect to the address that it listens on"
        )
    return None


def _examine(
    whom: socket.socket,
    token: bytes,
    purpose: bytes,
    until: float,
    contexts: _Contexts,
    insecure: bool,
) -> _Terms:
    """Check a client's proof that it has the token, and prove it in turn."""
    context = None
    if contexts.by_certificates is not None:
        manner, context = _BY_CERTIFICATES, contexts.by_certificates
    elif insecure:
        manner = _INSECURE
    elif within_host(whom):
        manner = _WITHIN_HOST
    else:
        manner, context = _BY_TOKEN, contexts.by_token()
    challenge = secrets.token_bytes(_NONCE_BYTES)
    expected = _GREETING + bytes([len(purpose)]) + purpose
    try:
        if _received(whom, len(expected), until) != expected:
            raise LinkError("somebody asked for another service, or for another version")
        theirs = _received(whom, _NONCE_BYTES, until)
        session = manner + purpose + b"\x00" + theirs + challenge
        whom.sendall(_GREETING + manner + challenge + _keyed(token, b"listens", session))
        proof = _received(whom, _PROOF_BYTES, until)
    except EOFError as error:
        raise LinkError("somebody left before it was known who it is") from error
    if not hmac.compare_digest(proof, _keyed(token, b"connects", session)):
        raise LinkError("somebody does not have the token")
    others, ours = (_keyed(token, b"frames of who " + who, session) for who in _SIDES)
    return _Terms(manner, context, Keys(ours, others), is_listening=True)


def _keyed(token: bytes, what: bytes, session: bytes) -> bytes:
    """Return 32 bytes for one use in one connection: its mode, purpose and challenges."""
    return hmac.digest(token, what + b"\x00" + session, "sha256")


def within_host(connected: socket.socket) -> bool:
    """True if a connection stays within this host: over loopback, or from one of its addresses to
    itself.

    Systems keep packets for their own addresses inside, and drop outside packets that claim to come
    from such an address.
    """
    here, there = connected.getsockname()[0], connected.getpeername()[0]
    return here == there or (_is_loopback(here) and _is_loopback(there))


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a name
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _received(whose: Socket, size: int, until: float) -> bytes:
    """Receive this many bytes before a deadline.

    Raises OSError (TimeoutError at the deadline), and EOFError with the bytes received before the
    end.
    """
    data = bytearray()
    while len(data) < size:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it takes too long")
        whose.settimeout(left_s)
        try:
            part = whose.recv(size - len(data))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError(bytes(data))
        data += part
    return bytes(data)


def _receive_all(whose: Socket, into: memoryview) -> None:
    if into.nbytes:  # memory of no bytes cannot be cast
        into = into.cast("B")
    while into.nbytes:
        got = whose.recv_into(into)
        if not got:
            raise LinkError("the connection ended in the middle of a frame")
        into = into[got:]


def _send_all(to: Socket, parts: list[memoryview]) -> None:
    first = 0
    while first < len(parts):
        sent = to.sendmsg(parts[first : first + _PARTS])
        while first < len(parts) and sent >= parts[first].nbytes:
            sent -= parts[first].nbytes
            first += 1
        if sent:
            parts[first] = parts[first][sent:]
