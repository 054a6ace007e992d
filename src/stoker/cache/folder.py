"""A folder held open: files in it are opened without following links, and without blocking.

A user with write access to the parent folder can replace a folder by another or by a link at any
moment. So a folder is opened once, checked, and used by its descriptor from then on.
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
# Others may have put a link, a pipe or a terminal there: it is not followed, waited for, or made
# ours.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class CacheFolder:
    """A folder, by its descriptor; the last part of its path is no link.

    With a ``parent``, ``path`` is the name inside it. Raises OSError where there is no folder.
    """

    def __init__(self, path: str, parent: CacheFolder | None = None) -> None:
        within = None if parent is None else parent.descriptor
        self.path: str = path if parent is None else os.path.join(parent.path, path)
        self.descriptor: int = os.open(path, _FOLDER, dir_fd=within)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def inside(self) -> str:
        """A path into it for this process and its children, valid even if the folder is moved.

        Without ``/proc``, its plain path.
        """
        own = f"/proc/self/fd/{self.descriptor}"
        return own if os.path.isdir(own) else self.path

    def is_own(self, *, alone: bool) -> bool:
        """True if this user owns it and others may not write to it (``alone``: nor read it)."""
        found = os.fstat(self.descriptor)
        barred = 0o077 if alone else 0o022
        return found.st_uid == os.getuid() and not found.st_mode & barred

    def check_owner(self, *, alone: bool) -> None:
        """Raise CacheError unless ``is_own``."""
        if self.is_own(alone=alone):
            return
        if os.fstat(self.descriptor).st_uid == os.getuid():
            does, bars = ("read or write to it", "go-rwx") if alone else ("write to it", "go-w")
            raise CacheError(
                f"{self.path} is not a folder of this user's alone: others may {does}. If none "
                f"has, take that from them: chmod {bars} {self.path}"
            )
        raise CacheError(f"{self.path} is not a folder of this user's alone: somebody else made it")

    def is_current(self) -> bool:
        """True if its path still leads to it."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self.descriptor))

    def list_names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def stat_file(self, name: str) -> os.stat_result:
        """Return a file's status. Raises OSError unless it is a regular file."""
        found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        _refuse_special(found, name)
        return found

    def open_file(self, name: str, flags: int) -> int:
        """Open a file, and return the descriptor. Raises OSError unless it is a regular file."""
        opened = os.open(name, flags | _FILE, 0o600, dir_fd=self.descriptor)
        try:
            _refuse_special(os.fstat(opened), name)
        except BaseException:
            os.close(opened)
            raise
        return opened

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return a file's first bytes. Raises OSError."""
        with os.fdopen(self.open_file(name, os.O_RDONLY), "rb") as file:
            return file.read(most_bytes)

    def replace_file(self, name: str, content: bytes) -> None:
        """Replace a file, as a whole or not at all. Raises OSError."""
        new = f".{name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with os.fdopen(self.open_file(new, flags), "wb") as file:
                file.write(content)
            os.replace(new, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # Ctrl-C came right after os.replace
                os.unlink(new, dir_fd=self.descriptor)
            raise

    def has_open_file(self, name: str, opened: int) -> bool:
        """True if a name in it still leads to the open file."""
        try:
            return os.path.samestat(self.stat_file(name), os.fstat(opened))
        except OSError:
            return False

    def rename(self, path: str) -> None:
        """Move it to a path where there is nothing yet."""
        os.rename(self.path, path)
        self.path = path

    def clear(self, last: str) -> None:
        """Remove it with its contents, ``last`` last, as far as possible."""
        for name in sorted(self.list_names(), key=last.__eq__):
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(name, dir_fd=self.descriptor).st_mode):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=self.descriptor)
                else:
                    os.unlink(name, dir_fd=self.descriptor)
        if self.is_current():
            with contextlib.suppress(OSError):
                os.rmdir(self.path)  # empty, or not at all


def _refuse_special(found: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "no regular file", name)
