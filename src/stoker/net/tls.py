"""Encryption of connections, where the network is not trusted."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


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
        """Return what wraps a socket.

        Raises OSError (ssl.SSLError) for files that cannot be read or do not fit.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context
