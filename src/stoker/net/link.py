"""An authenticated connection on which frames travel both ways.

Who has the cluster's token may connect, and is shown that the other side has it, too: each answers
the other's random challenge by HMAC, before anything else is read. Without TLS (``tls``) the frames
behind that are neither secret nor signed (docs/cluster.md says what that means on which network).

A frame is a header of a few bytes, which carries a checksum, and a body of any length, whose
checksum is the business of whoever knows what is in it.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import time
import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from stoker import fork_safety
from stoker.net.address import split_address
from stoker.net.tls import begins_encrypted, refuse, refuses_plain

if TYPE_CHECKING:
    from stoker.net.encrypted import EncryptedSocket
    from stoker.net.tls import Tls

MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 4 << 30

_GREETING = b"stoker\x00\x01"  # the last byte: version of what follows
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_WELCOME = b"\x01"
_MARK = b"STKF"
_FRAME = struct.Struct("<4sIQI")  # mark, bytes of the header, of the body, checksum of all that
_PARTS = 1_000  # of one system call; the kernel takes 1,024

Socket: TypeAlias = "socket.socket | EncryptedSocket"
Buffer = bytes | bytearray | memoryview | np.ndarray
Place = Callable[[bytes, int], memoryview]
"""Returns writable memory for a body, by the frame's header and the body's bytes."""


class LinkError(OSError):
    """A connection cannot be made or has ended: what it was is not known to be done."""


class LinkRefused(LinkError):
    """Somebody is there, but of another cluster or version: trying again does not help."""


class Link:
    """A connection to a process of the same cluster.

    One thread at a time may send, and one receive. An exception in the middle of a frame ends the
    connection: what follows could not be told from the rest of that frame.

    Args:
        connected: a socket whose other side is known to have the token.
        peer: the other side's address.
        timeout_s: the longest silence within a frame, in seconds.
    """

    def __init__(self, connected: Socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._socket = connected
        self.set_timeout(timeout_s)
        weakref.finalize(self, connected.close)

    @classmethod
    def connect(
        cls, address: str, token: bytes, purpose: str, *, timeout_s: float, tls: Tls | None = None
    ) -> Link:
        """Connect to a `Listener`.

        Args:
            address: ``host:port``.
            token: the cluster's secret.
            purpose: which service is meant; the listener must be of the same.
            timeout_s: for the connection as a whole, then the longest silence within a frame.
            tls: how to encrypt it, as the listener does; None: not at all.

        Raises LinkError, LinkRefused, ValueError for what is no address; TokenError.
        """
        host, port = split_address(address)
        until = time.monotonic() + timeout_s
        try:
            made = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise LinkError(f"{address} does not answer: {error}") from error
        proven = _secured(
            made,
            address,
            until,
            tls,
            lambda to: _introduce(to, token, purpose.encode(), until, address),
            server_side=False,
        )
        return cls(proven, address, timeout_s)

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
    ) -> Link:
        """Have somebody who connected prove to be of the cluster. Raises LinkError."""
        until = time.monotonic() + timeout_s
        made = _secured(
            connected,
            peer,
            until,
            tls,
            lambda whom: _examine(whom, token, purpose.encode(), until),
            server_side=True,
        )
        return cls(made, peer, timeout_s)

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
            _send_all(self._socket, [memoryview(_head(header, body_bytes)), *views])
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
            place: where the body goes; by default to new memory, which is the caller's.
            wait_s: how long a frame may take to begin, in seconds; None: for ever.

        Raises TimeoutError if none begins in that time, after which the connection goes on;
        EOFError if the other side closed it behind a frame; LinkError.
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
        """End the connection, from any thread: who waits in `receive` is woken.

        The socket itself goes with this object: its number must not be another's while a thread
        may still wait for it.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

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
        head = bytearray(_FRAME.size)
        got = self._socket.recv_into(head)
        if not got:
            raise EOFError(f"{self.peer} closed the connection")
        _receive_all(self._socket, memoryview(head)[got:])
        mark, header_bytes, body_bytes, checksum = _FRAME.unpack(head)
        if mark != _MARK or header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise LinkError(f"{self.peer} sent what is no frame")
        header = bytearray(header_bytes)
        _receive_all(self._socket, memoryview(header))
        if checksum != zlib.crc32(header, zlib.crc32(head[:-4])):
            raise LinkError(f"{self.peer} sent a damaged frame")
        if place is None:
            body = _view(np.empty(body_bytes, np.uint8))
        else:
            body = place(bytes(header), body_bytes)
        _receive_all(self._socket, body)
        return bytes(header), body


def _view(memory: Buffer) -> memoryview:
    return memoryview(memory)  # type: ignore[arg-type]  # arrays have buffers; Python 3.11 has no name for that


def _head(header: bytes, body_bytes: int) -> bytes:
    front = _FRAME.pack(_MARK, len(header), body_bytes, 0)[:-4]
    return front + zlib.crc32(header, zlib.crc32(front)).to_bytes(4, "little") + header


def _secured(
    made: socket.socket,
    who: str,
    until: float,
    tls: Tls | None,
    prove: Callable[[Socket], None],
    *,
    server_side: bool,
) -> Socket:
    """Encrypt a connection, if it is to be, and have both sides prove who they are."""
    proven: Socket = made
    fork_safety.close_in_children(made)
    try:
        made.settimeout(max(1e-3, until - time.monotonic()))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished is noticed where only this side waits.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            proven = tls.encrypted(made, server_side=server_side, until_s=until)
        prove(proven)
    except BaseException as error:
        made.close()
        if not isinstance(error, OSError) or isinstance(error, LinkError):
            raise
        if tls is not None:
            from stoker.net.encrypted import explained  # it takes time

            if reason := explained(error):
                raise LinkRefused(f"{who} refused the connection: {reason}") from error
        raise LinkError(f"{who} does not complete the connection: {error}") from error
    return proven


def _introduce(to: Socket, token: bytes, purpose: bytes, until: float, address: str) -> None:
    challenge = secrets.token_bytes(_NONCE_BYTES)
    to.sendall(_GREETING + bytes([len(purpose)]) + purpose + challenge)
    try:
        answer = _received(to, len(_GREETING) + _NONCE_BYTES + _PROOF_BYTES, until)
    except EOFError as error:
        if refuses_plain(error.args[0]):
            raise LinkRefused(
                f"{address} encrypts its connections (TLS): this host needs certificates, too, in "
                "~/.config/stoker/tls or where STOKER_TLS_FOLDER says"
            ) from error
        raise LinkError(
            f"{address} refused the connection: it is no {purpose.decode()} of this version"
        ) from error
    if not answer.startswith(_GREETING):
        raise LinkRefused(f"{address} is no {purpose.decode()} of this version")
    theirs = answer[len(_GREETING) :][:_NONCE_BYTES]
    if not hmac.compare_digest(
        answer[-_PROOF_BYTES:], _proof(token, b"listens", purpose, challenge, theirs)
    ):
        raise LinkRefused(f"{address} has another token: it belongs to another cluster")
    to.sendall(_proof(token, b"connects", purpose, challenge, theirs))
    try:
        _received(to, len(_WELCOME), until)
    except EOFError as error:
        raise LinkError(f"{address} refused the connection") from error


def _examine(whom: Socket, token: bytes, purpose: bytes, until: float) -> None:
    challenge = secrets.token_bytes(_NONCE_BYTES)
    expected = _GREETING + bytes([len(purpose)]) + purpose
    try:
        begun = _received(whom, len(expected), until)
        if begun != expected:
            if isinstance(whom, socket.socket) and begins_encrypted(begun):
                refuse(whom)
            raise LinkError("somebody asked for another service, or for another version")
        theirs = _received(whom, _NONCE_BYTES, until)
        whom.sendall(_GREETING + challenge + _proof(token, b"listens", purpose, theirs, challenge))
        proof = _received(whom, _PROOF_BYTES, until)
    except EOFError as error:
        raise LinkError("somebody left before it was known who it is") from error
    if not hmac.compare_digest(proof, _proof(token, b"connects", purpose, theirs, challenge)):
        raise LinkError("somebody does not have the token")
    whom.sendall(_WELCOME)


def _proof(token: bytes, role: bytes, purpose: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(token, role + b"\x00" + purpose + b"\x00" + client + server, "sha256")


def _received(whose: Socket, size: int, until: float) -> bytes:
    """Receive so many bytes before a time, however slowly they come.

    Raises OSError, TimeoutError among them, and EOFError with those that came before the end.
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
