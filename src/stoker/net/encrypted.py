"""A socket behind TLS: the few methods that connections use.

One thread may receive while another sends. A socket of the standard library does not promise that
(before Python 3.13 both would use OpenSSL's state at once). So that state works on memory here, in
turns, and whoever waits for the network holds no lock.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence

_PIECE_BYTES = 1 << 18


class EncryptedSocket:
    """Wraps a connected socket, which is this object's from then on.

    Args:
        connected: the socket.
        context: what to show, and whom to believe.
        server_side: whether the other side began.
        until_s: when the handshake has to be done, by the monotonic clock.

    Raises OSError, ssl.SSLError among them, where there is no connection; TimeoutError.
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
        """Send a beginning of the parts, one behind the other; return how many bytes."""
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
        """Send all of it; for what is short."""
        view = memoryview(data)
        while view.nbytes:
            view = view[self.sendmsg([view]) :]

    def pending(self) -> bool:
        """Tell whether something has been received that nobody has asked for yet."""
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
        """Wait for something from the network."""
        data = self._socket.recv(_PIECE_BYTES)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()


def explained(error: OSError) -> str | None:
    """Say why there is no encrypted connection; None if it may be there the next time."""
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is none of this host's authority ({error.verify_message})"
    return f"it does not accept this host's certificate ({error.reason})"
