"""Encryption of connections, where the network is not trusted.

Like the token, the files for it are those of the host: whoever connects, or listens, looks for them
there, and encrypts if they are. A host that has them talks to no host without.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import TokenError

if TYPE_CHECKING:
    import ssl

    from stoker.net.encrypted import EncryptedSocket

_FILES = ("certificate.pem", "key.pem", "authority.pem")
_RAYS = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_HELLO = b"\x16"  # how one begins who encrypts
_ALERT = b"\x15"
_REFUSAL = _ALERT + b"\x03\x03\x00\x02\x02\x47"  # fatal: insufficient security


@dataclass(frozen=True)
class Tls:
    """Files in PEM for TLS 1.3 in both directions: each side shows a certificate.

    A certificate need not name its host: whoever has one of this authority, and the cluster's
    token, belongs to the cluster. So the authority should sign for nothing else.
    """

    certificate: Path
    key: Path
    authority: Path
    """The certificate that signed all certificates of the cluster."""

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return what encrypts connections. Raises TokenError for files that are of no use."""
        import ssl  # it takes time

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # what comes first is what somebody waits for
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except OSError as error:
            raise TokenError(
                f"connections cannot be encrypted with {self.certificate}, {self.key} and "
                f"{self.authority}: {error}"
            ) from error
        return context

    def encrypted(
        self, connected: socket.socket, *, server_side: bool, until_s: float
    ) -> EncryptedSocket:
        """Encrypt a connection. Raises OSError, TokenError."""
        from stoker.net.encrypted import EncryptedSocket

        context = self.context(server=server_side)
        if server_side and connected.recv(1, socket.MSG_PEEK) not in (_HELLO, b""):
            refuse(connected)
            raise ConnectionError("it does not encrypt")
        return EncryptedSocket(connected, context, server_side=server_side, until_s=until_s)


def own_tls() -> Tls | None:
    """Return the files of this host, or None where connections are not encrypted.

    They are in the folder ``$STOKER_TLS_FOLDER``, else ``~/.config/stoker/tls``; where there is
    none, and Ray encrypts its own connections, they are Ray's.

    Raises TokenError for a folder that is not there, and where others can read the key.
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


def begins_encrypted(data: bytes) -> bool:
    """Tell whether this is how one begins who encrypts."""
    return data.startswith(_HELLO)


def refuses_plain(data: bytes) -> bool:
    """Tell whether this is how one answers who encrypts, to one who does not."""
    return data.startswith(_ALERT)


def refuse(connected: socket.socket) -> None:
    """Tell somebody that this side encrypts, or does not, and that one the other way."""
    connected.recv(1 << 12)  # what is not read before the end could hide what is said
    connected.sendall(_REFUSAL)
