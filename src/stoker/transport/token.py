"""The secret that the processes of one cluster share."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from stoker.errors import TokenError

# 256 bits: as strong as any key of TLS 1.3, and too many to guess.
TOKEN_BYTES = 32


def new_token() -> bytes:
    """Return a new secret: 32 random bytes."""
    return secrets.token_bytes(TOKEN_BYTES)


def token_path() -> Path:
    """Return the path of the user's token: ``$STOKER_TOKEN_FILE``, or one in ``~/.config``."""
    override = os.environ.get("STOKER_TOKEN_FILE")
    return Path(override) if override else Path.home() / ".config" / "stoker" / "token"


def read_token(path: Path) -> bytes:
    """Read a token: 64 hexadecimal digits in a file that no other user can read.

    Raises TokenError.
    """
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
    """Return the token in a file; if the file is missing, write a new token, atomically.

    Raises TokenError.
    """
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
