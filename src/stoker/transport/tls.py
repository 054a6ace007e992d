"""Encrypt connections: with the token that both sides have, or with certificates of the hosts.

The token needs no setup. But torchrun and Ray pass it through key-value stores that others may be
able to read. Certificates are safer: they are files of the host, like the token of named hosts.
Each end of a connection looks for these files, and uses them if they exist. A host with
certificates does not talk to a host without.

One thread may receive while another sends. `ssl.SSLSocket` does not promise that: before Python
3.13 both threads would use OpenSSL's state at once. So here OpenSSL works on buffers in memory,
under a lock, and no thread holds that lock while it waits for the network.
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


# Sixteen TLS records of 16 KiB are encrypted at a time, so a large body is never in memory twice.
_PIECE_BYTES = 1 << 18


class EncryptedSocket:
    """Wraps a connected socket, and owns it from then on.

    Args:
        connected: the socket.
        context: this end's certificate, and the trusted authority.
        server_side: whether this end accepted the connection.
        until_s: the deadline of the handshake, by the monotonic clock.

    Raises OSError if the handshake fails (ssl.SSLError is one), TimeoutError at the deadline.
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
        self._lock = threading.Lock()  # guards the three below
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
                self._feed_incoming()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return 0

    def recv(self, size: int) -> bytes:
        """Receive up to ``size`` bytes; none at the end of the connection."""
        into = bytearray(size)
        return bytes(into[: self.recv_into(into)])

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send the first bytes of the parts, one after another; return how many were sent."""
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
            finally:  # also after an error: OpenSSL may have an alert for the other side
                self._socket.settimeout(max(1e-3, until_s - time.monotonic()))
                self._socket.sendall(self._outgoing.read())
            if is_done:
                return
            if time.monotonic() > until_s:
                raise TimeoutError("the TLS handshake took too long")
            self._feed_incoming()

    def _feed_incoming(self) -> None:
        """Wait for bytes from the network."""
        data = self._socket.recv(_PIECE_BYTES)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()


def rejection_reason(error: OSError) -> str | None:
    """Return why the peer or this host rejected a certificate; None if a retry may work."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"this host's authority did not sign its certificate ({error.verify_message})"
    return f"it rejected this host's certificate ({error.reason})"


_FILE_NAMES = ("certificate.pem", "key.pem", "authority.pem")
_RAY_VARIABLES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
# Contexts that are kept: making a token's certificate takes 20 ms (bench/results/encryption.json).
_MAX_CONTEXTS = 16


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS 1.3 in both directions: each side shows a certificate.

    A certificate need not name its host. A process belongs to the cluster if it has a certificate
    of this authority and the cluster's token. So the authority should sign no other certificates.
    """

    certificate: Path
    key: Path
    authority: Path
    """The certificate that signed all certificates of the cluster."""

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the TLS context. Raises TokenError for unusable files."""
        context = _new_context(server)
        for path in (self.certificate, self.key, self.authority):
            # OpenSSL would wait for the writer of a named pipe.
            if path.exists() and not path.is_file():
                raise TokenError(f"{path} is not a regular file")
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except OSError as error:
            raise TokenError(
                f"cannot encrypt connections with {self.certificate}, {self.key} and "
                f"{self.authority}: {error}"
            ) from error
        return context


@functools.lru_cache(maxsize=_MAX_CONTEXTS)
def token_context(token: bytes, *, server: bool) -> ssl.SSLContext:
    """Return a TLS context that accepts only peers with the same token."""
    from stoker.transport.token_certificate import make_certificate

    certificate = make_certificate(token)
    context = _new_context(server)
    context.load_verify_locations(cadata=certificate.certificate)
    with _nameless_file() as file:  # OpenSSL loads keys from files only
        file.write(certificate.key + _pem(certificate.certificate))
        file.flush()
        context.load_cert_chain(f"/dev/fd/{file.fileno()}")
    return context


def _new_context(server: bool) -> ssl.SSLContext:
    """Return a context for TLS 1.3 in which each end must show a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # otherwise tickets, which nobody uses, would be sent first
    return context


def _pem(certificate: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(certificate).encode()


def _nameless_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stoker-key", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()


def host_tls() -> Tls | None:
    """Return the certificate files of this host; None if it has only the token.

    They are in the folder ``$STOKER_TLS_FOLDER``, by default ``~/.config/stoker/tls``. Without that
    folder they are Ray's, if Ray encrypts its own connections.

    Raises TokenError for a missing folder, and if other users can read the key.
    """
    override = os.environ.get("STOKER_TLS_FOLDER")
    folder = Path(override) if override else Path.home() / ".config" / "stoker" / "tls"
    if folder.is_dir():
        files = Tls(*(folder / name for name in _FILE_NAMES))
        with contextlib.suppress(OSError):  # `Tls.context` reports a missing file
            if stat.S_IMODE(files.key.stat().st_mode) & 0o077:
                raise TokenError(f"other users can read {files.key}: run chmod 600 {files.key}")
        return files
    if override:
        raise TokenError(f"STOKER_TLS_FOLDER names {override}, but there is no such folder")
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return Tls(*(Path(os.environ[name]) for name in _RAY_VARIABLES))
    return None
