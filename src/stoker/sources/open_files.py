"""Local files that stay open, to be read by offset from any thread.

Reads go through the page cache as a memory map's would. But a map of a file that was cut short
kills the process (SIGBUS), and a page fault holds the GIL.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.cache.fingerprint import of_file

MOST_OPEN = 256


class FileVersion(NamedTuple):
    """What tells a file from what it was before."""

    size_bytes: int
    modified_ns: int
    """When it was modified, which ``rsync -t`` and ``cp -p`` set back; of a remote one a digest."""
    changed_ns: int = 0
    """When a local file was changed in any way, which no tool can set back."""
    inode: int = 0
    """Of a local file, where its file system goes on numbering it so."""


def version_of(found: os.stat_result) -> FileVersion:
    """Return the version of a local file as it was found."""
    told = of_file("", found)
    return FileVersion(told.size_bytes, told.version, told.changed_ns, told.inode)


class OpenFiles:
    """Opens files when they are first read, in each process anew. Pickles as an empty one.

    There is no lock, which a forked child could inherit held: a file that two threads open at the
    same time is closed again with the last reference to it.
    """

    def __init__(self, host: str | None = None) -> None:
        self._open: dict[str, OpenFile] = {}
        self._host = host or socket.gethostname()  # where the versions were looked up
        self._is_there = self._host == socket.gethostname()

    def __reduce__(self) -> tuple[object, ...]:
        return OpenFiles, (self._host,)

    def read(self, path: str, version: FileVersion, start: int, nbytes: int) -> bytes:
        """Return bytes of a file that is still of this version.

        Raises ValueError if it has changed, or has not so many bytes; OSError.
        """
        return self.opened(path, version).read(start, nbytes)

    def read_values(
        self, path: str, version: FileVersion, starts: Iterable[int], out: NDArray[Any]
    ) -> None:
        """Read as many values as a row of ``out`` has, from each byte of ``starts`` on.

        ``out`` is C-ordered, with two axes. Raises as ``read``.
        """
        self.opened(path, version).read_parts(
            starts, out.view(np.uint8).reshape(-1).data, out[0].nbytes
        )

    def opened(self, path: str, version: FileVersion) -> OpenFile:
        """Return a file that is still of this version. Raises ValueError if it has changed."""
        file = self._open.get(path)
        if file is None:
            file = OpenFile(path)
            if len(self._open) >= MOST_OPEN:
                self._open = {}  # who reads one of them has a reference
            self._open[path] = file
        if not self._is_still(file, version):
            self._open.pop(path, None)
            raise ValueError(f"{path} has changed since the pipeline was built: build it anew")
        return file

    def _is_still(self, file: OpenFile, version: FileVersion) -> bool:
        found = os.fstat(file.descriptor)
        now = version_of(found)
        # What was replaced while it is open changes by that alone: its content stays.
        return now == version or (
            now[:2] == version[:2] and (not self._is_there or not found.st_nlink)
        )


class OpenFile:
    """A regular file, closed with the last reference to it. Raises OSError for what is none.

    Attributes:
        descriptor: which belongs to it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Opening a pipe would wait for its writer.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", path)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def version(self) -> FileVersion:
        """Look up the version of what is open now."""
        return version_of(os.fstat(self.descriptor))

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes. Raises ValueError where the file ends before."""
        data = os.pread(self.descriptor, nbytes, start)
        while len(data) < nbytes:  # a signal, or more than the kernel reads at once
            more = os.pread(self.descriptor, nbytes - len(data), start + len(data))
            if not more:
                raise ValueError(
                    f"{self.path} is truncated: {nbytes:,} bytes from byte {start:,} on reach "
                    f"beyond its end at byte {start + len(data):,}"
                )
            data += more
        return data

    def read_parts(self, starts: Iterable[int], out: memoryview, nbytes: int) -> None:
        """Fill ``out`` with so many bytes from each start on. Raises as ``read``."""
        descriptor, preadv = self.descriptor, os.preadv
        for at, start in zip(range(0, len(out), nbytes), starts, strict=True):
            part = out[at : at + nbytes]
            if preadv(descriptor, (part,), start) < nbytes:
                part[:] = self.read(start, nbytes)
