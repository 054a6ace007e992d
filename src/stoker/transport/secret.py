"""How the processes of one cluster recognize each other, and encrypt: a token, and certificates.

All processes of a cluster have the same token. A private key and a self-signed certificate are
derived from it, so each end can show the one certificate that the other end accepts (TLS 1.3). This
needs no setup. But torchrun and Ray pass the token through key-value stores that others may be able
to read. Certificates of the hosts are safer: they are files, and each end uses them if they exist.
A host with certificates does not talk to a host without.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hmac
import os
import secrets
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import TokenError

# 256 bits: as strong as any key of TLS 1.3, and too many to guess.
TOKEN_BYTES = 32
_FILE_NAMES = ("certificate.pem", "key.pem", "authority.pem")
_RAY_VARIABLES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
# Contexts that are kept. A process has one or two tokens; a test suite has more.
_MAX_CONTEXTS = 16
# In OpenSSL's names of alerts. The second: an authority of the same name has not signed it.
_REJECTIONS = ("UNKNOWN_CA", "DECRYPT_ERROR", "CERTIFICATE")
# OpenSSL's code for a certificate that signs itself, as those of tokens do.
_SELF_SIGNED = 18


@dataclass(frozen=True)
class Certificates:
    """PEM files of this host for TLS 1.3: each end shows its certificate.

    A certificate need not name its host. A process belongs to the cluster if it has a certificate
    of this authority and the cluster's token. So the authority should sign no other certificates.
    """

    certificate: Path
    key: Path
    authority: Path
    """The certificate that signed all certificates of the cluster."""

    def context(self, *, server: bool) -> ssl.SSLContext:
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


@dataclass(frozen=True)
class Secret:
    """What one end of a connection has, to prove that it belongs to the cluster, and to encrypt.

    ``token``: 32 bytes. ``certificates``: those of this host; None: the token's own. ``insecure``:
    whether to encrypt nothing, unless this host has certificates; both ends must be told so.
    """

    token: bytes = field(repr=False)
    certificates: Certificates | None = None
    insecure: bool = False

    @classmethod
    def of_host(cls, token: bytes, *, insecure: bool = False) -> Secret:
        """Return a secret with this host's certificates, if it has any. Raises TokenError."""
        return cls(token, host_certificates(), insecure)

    def context(self, *, server: bool) -> ssl.SSLContext | None:
        """Return the TLS context; None for a connection that is not encrypted.

        Raises TokenError for unusable files; ImportError if cryptography is needed and missing.
        """
        if self.certificates is not None:
            return self.certificates.context(server=server)
        return None if self.insecure else _token_context(self.token, server)

    def proof(self, side: bytes, transcript: bytes) -> bytes:
        """Return 32 bytes that only a holder of the token can make of ``transcript``."""
        return hmac.digest(self.token, side + b"\x00" + transcript, "sha256")

    def refusal(self, error: OSError, peer: str) -> str | None:
        """Return why a TLS handshake with ``peer`` cannot succeed; None if a retry may help."""
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code == _SELF_SIGNED:
                if self.certificates is None:
                    return another_token(peer)
                return (
                    f"{peer} does not encrypt connections with certificates (TLS), but this host "
                    "does. Give both hosts certificates, or neither"
                )
            if self.certificates is None:
                return (
                    f"{peer} encrypts connections with certificates, but this host has none. Put "
                    f"{', '.join(_FILE_NAMES[:2])} and {_FILE_NAMES[2]} into ~/.config/stoker/tls, "
                    "or set STOKER_TLS_FOLDER to their folder"
                )
            return (
                f"{peer} refused the connection: this host's authority did not sign its "
                f"certificate ({error.verify_message})"
            )
        reason = str(getattr(error, "reason", None) or "")
        if any(word in reason for word in _REJECTIONS):  # in an alert that the peer has sent
            return f"{peer} refused the connection: it rejected this host's certificate ({reason})"
        if reason == "WRONG_VERSION_NUMBER":  # bytes that are not TLS
            return (
                f"{peer} does not encrypt connections: if it was started with insecure=True on "
                "purpose, give insecure=True here, too"
            )
        return None


def another_token(peer: str) -> str:
    return (
        f"{peer} has another token, so it belongs to another cluster. Copy the token file of one "
        "host to all hosts of the cluster"
    )


@functools.lru_cache(_MAX_CONTEXTS)
def _token_context(token: bytes, server: bool) -> ssl.SSLContext:
    """Return a TLS context that accepts only peers with the same token."""
    certificate, key = _make_certificate(token)
    context = _new_context(server)
    context.load_verify_locations(cadata=certificate.decode("ascii"))
    # OpenSSL loads keys from files only; this one has no name.
    with os.fdopen(os.memfd_create("stoker-key", os.MFD_CLOEXEC), "w+b") as file:
        file.write(key + certificate)
        file.flush()
        context.load_cert_chain(f"/dev/fd/{file.fileno()}")
    return context


def _make_certificate(token: bytes) -> tuple[bytes, bytes]:
    """Return the token's self-signed certificate and its private key, both PEM.

    A self-signed certificate is trusted only if it is byte for byte the known one. Signatures of
    Ed25519 contain nothing random, so all holders of the token make the same certificate.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ImportError(
            f"connections to other hosts are encrypted with the package cryptography ({error}): "
            "pip install cryptography"
        ) from error
    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(token, b"stoker key", "sha256"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stoker")])
    # It never expires: these are the first and the last day that hosts' clocks can show.
    since = datetime.datetime(2000, 1, 1)
    until = datetime.datetime(9999, 12, 31, 23, 59, 59)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, since, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _new_context(server: bool) -> ssl.SSLContext:
    """Return a context for TLS 1.3 in which each end must show a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # otherwise tickets, which nobody uses, would be sent first
    return context


def host_certificates() -> Certificates | None:
    """Return the certificate files of this host; None if it has only the token.

    They are in the folder ``$STOKER_TLS_FOLDER``, by default ``~/.config/stoker/tls``. Without that
    folder they are Ray's, if Ray encrypts its own connections.

    Raises TokenError for a missing folder, and if other users can read the key.
    """
    override = os.environ.get("STOKER_TLS_FOLDER")
    folder = Path(override) if override else Path.home() / ".config" / "stoker" / "tls"
    if folder.is_dir():
        files = Certificates(*(folder / name for name in _FILE_NAMES))
        with contextlib.suppress(OSError):  # `Certificates.context` reports a missing file
            if stat.S_IMODE(files.key.stat().st_mode) & 0o077:
                raise TokenError(f"other users can read {files.key}: run chmod 600 {files.key}")
        return files
    if override:
        raise TokenError(f"STOKER_TLS_FOLDER names {override}, but there is no such folder")
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return Certificates(*(Path(os.environ[name]) for name in _RAY_VARIABLES))
    return None


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


def token_path() -> Path:
    """Return the path of the user's token: ``$STOKER_TOKEN_FILE``, or one in ``~/.config``."""
    override = os.environ.get("STOKER_TOKEN_FILE")
    return Path(override) if override else Path.home() / ".config" / "stoker" / "token"


def read_token(path: Path) -> bytes:
    """Read a token: 64 hexadecimal digits in a file that no other user can read, or TokenError."""
    try:
        # Not blocking: opening a named pipe would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(4 * TOKEN_BYTES) if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise TokenError(
            f"cannot read the token in {path} ({error.strerror}): copy the file from another host "
            "of the cluster, or set STOKER_TOKEN_FILE to its path"
        ) from error
    if text is None:
        raise TokenError(f"{path} is not a regular file: give the path of a file with the token")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise TokenError(
            f"other users can read {path}: run chmod 600 {path}, and make a new token, as they may "
            "have copied this one"
        )
    if status.st_uid != os.geteuid():
        raise TokenError(
            f"{path} belongs to user {status.st_uid}, but this process runs as user {os.geteuid()}"
        )
    try:
        token = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise TokenError(
            f"{path} holds no token: a token is {2 * TOKEN_BYTES} hexadecimal digits. Copy the "
            "file from another host of the cluster again"
        )
    return token


def make_token_file(path: Path) -> bytes:
    """Return the token in a file; if the file is missing, write a new token, atomically."""
    if path.exists():  # perhaps in a folder that cannot be written to
        return read_token(path)
    # Readable by the user alone: anybody who can read the token may join the cluster.
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(new_token().hex() + "\n")
        # If the file exists by now, another process was faster: its token is used.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    return read_token(path)
