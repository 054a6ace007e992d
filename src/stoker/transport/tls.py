"""Encryption of connections: by the token that both sides have, or by certificates of their hosts.

One thread may receive while another sends. A socket of the standard library does not promise that
(before Python 3.13 both would use OpenSSL's state at once). So here that state works on memory, in
turns, and no thread waits for the network under a lock.

The token is enough, and needs no setup. But it may travel to hosts in ways that others can read
(the key-value stores of torchrun and Ray). Certificates are files of the host, as is the token of
named hosts: both ends of a connection look for them there, and use them if they exist. A host with
certificates talks to no host without.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from stoker.errors import TokenError

if TYPE_CHECKING:
    import ssl


# Sixteen TLS records of 16 KiB: encrypted at once without a second copy of a large body in memory.
_PIECE_BYTES = 1 << 18


class EncryptedSocket:
    """Wraps a connected socket, and owns it from then on.

    Args:
        connected: the socket.
        context: this end's certificate, and the trusted authority.
        server_side: whether the other end connected.
        until_s: the handshake's deadline, by the monotonic clock.

    Raises OSError (ssl.SSLError included) if the handshake fails; TimeoutError.
    """

    def __init__(
        self,
        connected: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        until_s: float,
    ) -> None:
        self._socket = connected
        self._lock = threading.Lock()  # on all that follows
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._state = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._shake_hands(until_s)

    def recv_into(self, into: bytearray | memoryview) -> int:
        """Receive some bytes; 0 at the end of the connection."""
        size = len(into)
        while True:
            try:
                with self._lock:
                    return self._state.read(size, into)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._take_in()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return 0

    def recv(self, size: int) -> bytes:
        """Receive up to so many bytes; none at the end of the connection."""
        into = bytearray(size)
        return bytes(into[: self.recv_into(into)])

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send the first bytes of the parts, one after another; return how many."""
        sent = 0
        with self._lock:
            for part in parts:
                piece = memoryview(part)[: _PIECE_BYTES - sent]
                if piece.nbytes:
                    sent += self._state.write(piece)
            encrypted = self._outgoing.read()
        self._socket.sendall(encrypted)
        return sent

    def sendall(self, data: bytes) -> None:
        """Send all bytes; for short messages."""
        view = memoryview(data)
        while view.nbytes:
            view = view[self.sendmsg([view]) :]

    def pending(self) -> bool:
        """True if received bytes wait to be read."""
        with self._lock:
            return bool(self._state.pending() or self._incoming.pending)

    def settimeout(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _shake_hands(self, until_s: float) -> None:
        while True:
            is_done = True
            try:
                self._state.do_handshake()
            except ssl.SSLWantReadError:
                is_done = False
            finally:  # what is wrong is said, too
                self._socket.settimeout(max(1e-3, until_s - time.monotonic()))
                self._socket.sendall(self._outgoing.read())
            if is_done:
                return
            if time.monotonic() > until_s:
                raise TimeoutError("it takes too long")
            self._take_in()

    def _take_in(self) -> None:
        """Wait for bytes from the network."""
        data = self._socket.recv(_PIECE_BYTES)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()


def explained(error: OSError) -> str | None:
    """Return why encryption failed for good; None if a retry may work."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is none of this host's authority ({error.verify_message})"
    return f"it does not accept this host's certificate ({error.reason})"


_FILES = ("certificate.pem", "key.pem", "authority.pem")
_RAYS = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
# Tokens whose certificates are kept: making one takes 20 ms (bench/encryption.py).
_KEPT = 16


@dataclass(frozen=True)
class Tls:
    """Files in PEM for TLS 1.3 in both directions: each side shows a certificate.

    A certificate need not name its host: a process with one of this authority, and with the
    cluster's token, belongs to the cluster. So the authority should sign no other certificates.
    """

    certificate: Path
    key: Path
    authority: Path
    """The certificate that signed all certificates of the cluster."""

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the TLS context. Raises TokenError for unusable files."""
        context = _mutual(server)
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except OSError as error:
            raise TokenError(
                f"connections cannot be encrypted with {self.certificate}, {self.key} and "
                f"{self.authority}: {error}"
            ) from error
        return context


@functools.lru_cache(maxsize=_KEPT)
def token_context(token: bytes, *, server: bool) -> ssl.SSLContext:
    """Return a TLS context for connections between holders of a token only."""
    from stoker.transport.token_certificate import make_certificate

    made = make_certificate(token)
    context = _mutual(server)
    context.load_verify_locations(cadata=made.certificate)
    with _nameless_file() as file:  # OpenSSL takes keys from files
        file.write(made.key + _pem(made.certificate))
        file.flush()
        context.load_cert_chain(f"/dev/fd/{file.fileno()}")
    return context


def _mutual(server: bool) -> ssl.SSLContext:
    """Return a context of TLS 1.3 in which each end must show a certificate."""
    import ssl  # it takes time

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # what comes first is what somebody waits for
    return context


def _pem(certificate: bytes) -> bytes:
    import ssl

    return ssl.DER_cert_to_PEM_cert(certificate).encode()


def _nameless_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stoker-key", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()


def own_tls() -> Tls | None:
    """Return the certificate files of this host, or None where it has only the token.

    They are in the folder ``$STOKER_TLS_FOLDER``, else ``~/.config/stoker/tls``; without that
    folder, if Ray encrypts its own connections, they are Ray's.

    Raises TokenError for a missing folder, and if other users can read the key.
    """
    chosen = os.environ.get("STOKER_TLS_FOLDER")
    folder = Path(chosen) if chosen else Path.home() / ".config" / "stoker" / "tls"
    if folder.is_dir():
        found = Tls(*(folder / name for name in _FILES))
        with contextlib.suppress(OSError):  # said where it is read
            if stat.S_IMODE(found.key.stat().st_mode) & 0o077:
                raise TokenError(f"{found.key} can be read by others: chmod 600 {found.key}")
        return found
    if chosen:
        raise TokenError(f"STOKER_TLS_FOLDER names {chosen}, which is no folder")
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return Tls(*(Path(os.environ[name]) for name in _RAYS))
    return None
