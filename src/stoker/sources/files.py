"""Local files: which of them are examples, and how they are read, whole or by offset.

Files that are read by offset stay open, and any thread may read them. Reads go through the page
cache as a memory map's would. But a map of a file that was cut short kills the process (SIGBUS),
and a page fault holds the GIL.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics import resources
from stoker.basics.fingerprint import of_file
from stoker.basics.warn import warn

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
# Asking for free memory reads files of the kernel: too much for each image. Only large, sparse
# files can surprise.
_LARGE_BYTES = 1 << 28
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# A quarter of the 1,024 descriptors that a process usually has.
MOST_OPEN = 256


def read_file(path: str) -> bytes:
    """Read a regular file, or what a link to one leads to; return all of its bytes.

    Raises OSError for what is none (by now: it may have been one when it was listed) without
    waiting for its other end, and when there is not the memory for it.
    """
    # Opening a pipe would wait for its writer. To regular files O_NONBLOCK means nothing.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
            number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
            raise OSError(number, f"no regular file but {kind}", path)
        refuse_too_large(found.st_size, path)
        with open(handle, "rb", buffering=0, closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def refuse_too_large(nbytes: int, path: str) -> None:
    """Raise OSError if there is not the memory for a file of this size: it may be a sparse one."""
    if nbytes > _LARGE_BYTES and nbytes > resources.usable_memory_bytes():
        size = resources.format_bytes(nbytes)
        raise OSError(errno.EFBIG, f"{size} do not fit into memory", path)


def files_below(folder: str, suffixes: tuple[str, ...], left_out: list[str]) -> Iterator[str]:
    """Yield files with such suffixes, hidden ones left out, each folder once however it is linked.

    What has such a suffix and is no regular file, and folders that cannot be listed, are
    added to ``left_out``.
    """
    seen = set()
    folders = [folder]
    while folders:
        at = folders.pop()
        real = os.path.realpath(at)
        if real in seen:
            continue
        seen.add(real)
        try:
            entries = list(os.scandir(at))
        except OSError:
            left_out.append(at)
            continue
        within = []
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            is_meant = name.lower().endswith(suffixes)
            if is_meant and entry.is_file(follow_symlinks=False):
                yield entry.path
            elif os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                within.append(entry.path)
            elif is_meant:
                if is_special(entry.path):
                    left_out.append(entry.path)
                else:
                    yield entry.path
        folders += reversed(within)


def is_special(path: str) -> bool:
    """Tell whether a path leads to something that is neither a file nor a folder."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def warn_left_out(source: str, left_out: Sequence[str]) -> None:
    """Say what was found and is no example."""
    if left_out:
        more = f" and {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
        warn(
            f"{source}: left out is what is no regular file, or cannot be listed: "
            f"{min(left_out)!r}{more}"
        )


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


class SeekableFile(io.RawIOBase):
    """Keeps the place in a file of known size; who inherits has ``readinto``.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at
