"""A folder that is held open; its files are opened without following links and without blocking.

Any user with write access to the parent can replace a folder by another one, or by a link, at any
moment. So a folder is opened once, checked, and then used through its descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from typing import Self

from stoker.errors import CacheError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Others may have put a link, a pipe or a terminal there: do not follow it, wait for it, or make it
# this process's terminal.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class CacheFolder:
    """An open folder; the last part of its path is not a link.

    Raises OSError if there is no folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor: int = os.open(path, _FOLDER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def inside(self) -> str:
        """A path for this process and its children that stays valid if the folder is moved."""
        return f"/proc/self/fd/{self.descriptor}"

    def is_own(self, *, private: bool) -> bool:
        """True if this user owns it and others may not write to it (``private``: nor read it)."""
        status = os.fstat(self.descriptor)
        forbidden_mode = 0o077 if private else 0o022
        return status.st_uid == os.getuid() and not status.st_mode & forbidden_mode

    def check_owner(self, *, private: bool) -> None:
        """Raise CacheError unless ``is_own``."""
        if self.is_own(private=private):
            return
        if os.fstat(self.descriptor).st_uid == os.getuid():
            access, chmod_mode = ("read or write", "go-rwx") if private else ("write to", "go-w")
            raise CacheError(
                f"{self.path} does not belong to this user alone: other users may {access} it. If "
                f"none of them has done so, run chmod {chmod_mode} {self.path}"
            )
        raise CacheError(f"{self.path} does not belong to this user alone: another user owns it")

    def is_current(self) -> bool:
        """True if the path still leads to this folder."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(status, os.fstat(self.descriptor))

    def list_names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def stat_file(self, name: str) -> os.stat_result:
        """Return a file's status. Raises OSError unless it is a regular file."""
        status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        _refuse_special(status, name)
        return status

    def open_file(self, name: str, flags: int) -> int:
        """Open a file; return its descriptor. Raises OSError unless it is a regular file."""
        descriptor = os.open(name, flags | _FILE, 0o600, dir_fd=self.descriptor)
        try:
            _refuse_special(os.fstat(descriptor), name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return a file's first bytes. Raises OSError."""
        with os.fdopen(self.open_file(name, os.O_RDONLY), "rb") as file:
            return file.read(most_bytes)

    def replace_file(self, name: str, content: bytes) -> None:
        """Replace a file atomically. Raises OSError."""
        new = f".{name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with os.fdopen(self.open_file(new, flags), "wb") as file:
                file.write(content)
            os.replace(new, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # if Ctrl-C came right after os.replace
                os.unlink(new, dir_fd=self.descriptor)
            raise

    def has_open_file(self, name: str, descriptor: int) -> bool:
        """True if a name in the folder still leads to an open file."""
        try:
            return os.path.samestat(self.stat_file(name), os.fstat(descriptor))
        except OSError:
            return False

    def rename(self, path: str) -> None:
        """Move the folder to a path that does not exist yet."""
        os.rename(self.path, path)
        self.path = path

    def clear(self, last: str) -> None:
        """Remove the folder and its contents as far as possible, the file ``last`` last."""
        for name in sorted(self.list_names(), key=last.__eq__):
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(name, dir_fd=self.descriptor).st_mode):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=self.descriptor)
                else:
                    os.unlink(name, dir_fd=self.descriptor)
        if self.is_current():
            with contextlib.suppress(OSError):
                os.rmdir(self.path)  # fails if it is not empty


def _refuse_special(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
