"""Local files: finding examples, and reading files whole or by offset.

Files that are read by offset stay open, and any thread may read them. Reads go through the page
cache as a memory map's would. But a map of a file that was cut short kills the process (SIGBUS),
and a page fault holds the GIL.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from stoker.basics import resources
from stoker.basics.fingerprint import of_file
from stoker.basics.future import OneShot, start_thread
from stoker.basics.signals import finalize
from stoker.basics.warn import warn
from stoker.images import native

T = TypeVar("T")

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
# Smaller files are read without a check of free memory, which reads files of the kernel: that would
# slow each image down. Chosen, not measured.
_LARGE_BYTES = 1 << 28
_PART_BYTES = 1 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
# Of headers and footers: many headers of small files lie in it. At 100 MB/s so much takes less than
# a request, or a disk's seek.
READ_AT_LEAST = 1 << 16
# A user who waits for an index sees that it goes on; most are built in less, without a line.
_SHOW_EVERY_S = 2.0
# A quarter of the 1,024 descriptors that a process usually has.
MOST_OPEN = 256


def absolute(path: str) -> str:
    """Return a path that means the same file after a later ``os.chdir``, and in other processes.

    It is not normalized: ``link/..`` may lie elsewhere than ``link``.
    """
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def read_file(path: str) -> bytes:
    """Read a regular file, or a link to one; return all of its bytes.

    Raises OSError for another kind, without waiting for a pipe's other end, and for what does not
    fit into memory.
    """
    # Opening a pipe would wait for its writer. To regular files O_NONBLOCK means nothing.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
            number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
            raise OSError(number, f"not a regular file but {kind}", path)
        refuse_too_large(found.st_size, path)
        # Each call lets another thread have the GIL: a file object makes three more.
        data = os.read(handle, found.st_size + 1)
        if len(data) == found.st_size:
            return data
        parts = [data]  # it has grown, is cut short, or is larger than one call reads
        while part := os.read(handle, _PART_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(handle)


def read_files(paths: Sequence[str]) -> list[bytes]:
    """Read regular files; the same as ``read_file`` of each, which raises the errors.

    With ``stoker-native`` the GIL is released once for some files, otherwise four times for each.
    With 16 threads beside a GPU, where each waits for the GIL behind the others and the training
    loop, releases were what took the time (bench/gpu.py).
    """
    read: Callable[[Sequence[str]], list[bytes]] | None
    read = getattr(native.library(), "read_files", None)
    found: list[bytes] = []
    if read is not None and not any("\0" in path for path in paths):
        found = read(paths)
    return found + [read_file(path) for path in paths[len(found) :]]


def refuse_too_large(nbytes: int, path: str) -> None:
    """Raise OSError if a file of this size does not fit into memory: it may be sparse."""
    if nbytes > _LARGE_BYTES and nbytes > resources.usable_memory_bytes():
        size = resources.format_bytes(nbytes)
        raise OSError(errno.EFBIG, f"{size} do not fit into memory", path)


def files_below(folder: str, suffixes: tuple[str, ...], left_out: list[str]) -> Iterator[str]:
    """Yield files with these suffixes, without hidden ones, and each linked folder only once.

    Adds to ``left_out`` what is meant and not a regular file, and folders that cannot be listed.
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
    """True if a path leads to neither a file nor a folder."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def warn_left_out(source: str, left_out: Sequence[str]) -> None:
    """Warn of paths that were found and are not examples."""
    if left_out:
        more = f" and {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
        warn(
            f"{source}: these paths are not regular files, or cannot be listed, and are left out: "
            f"{min(left_out)!r}{more}"
        )


def compression_of(head: bytes) -> str:
    """Return the command that compressed a whole file, from its first bytes; "" for none."""
    return next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), "")


class FileVersion(NamedTuple):
    """The version of a file: it changes with the content."""

    size_bytes: int
    modified_ns: int
    """The time of modification, which ``rsync -t`` and ``cp -p`` reset; for a remote file a
    digest."""
    changed_ns: int = 0
    """The time of a local file's last change of any kind. No tool can reset it."""
    inode: int = 0
    """The inode of a local file, if its file system keeps the numbers of files."""

    @property
    def is_known(self) -> bool:
        """False for a remote file whose server tells nothing of its version."""
        return bool(self.modified_ns or self.changed_ns)


def version_of(found: os.stat_result) -> FileVersion:
    """Return the version of a local file from its status."""
    of = of_file("", found)
    return FileVersion(of.size_bytes, of.version, of.changed_ns, of.inode)


class OpenFiles:
    """Opens files on first read, in each process again. Pickles as an empty one.

    There is no lock, which a forked child could inherit held: a file that two threads open at the
    same time is closed again with the last reference to it.
    """

    def __init__(self, host: str | None = None) -> None:
        self._open: dict[str, OpenFile] = {}
        self._host = host or socket.gethostname()  # the process that looked up the versions
        self._is_there = self._host == socket.gethostname()

    def __reduce__(self) -> tuple[object, ...]:
        return OpenFiles, (self._host,)

    def read(self, path: str, version: FileVersion, start: int, nbytes: int) -> bytes:
        """Return bytes of a file that is still of this version. Raises ValueError, OSError."""
        return self.open(path, version).read(start, nbytes)

    def open(self, path: str, version: FileVersion) -> OpenFile:
        """Return an open file of this version. Raises ValueError if it has changed."""
        file = self._open.get(path)
        if file is None:
            file = OpenFile(path)
            if len(self._open) >= MOST_OPEN:
                self._open = {}  # a reader of one of them has a reference
            self._open[path] = file
        found = os.fstat(file.descriptor)
        now = version_of(found)
        # Replacing an open file changes its status, but not the content that is read here.
        is_alike = now[:2] == version[:2] and (not self._is_there or not found.st_nlink)
        if now != version and not is_alike:
            self._open.pop(path, None)
            raise ValueError(f"{path} has changed since the pipeline was built: build it again")
        return file


class OpenFile:
    """A regular file, closed with the last reference to it. Raises OSError for other kinds."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Opening a pipe would wait for its writer.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            os.close(self.descriptor)
            raise OSError(errno.EINVAL, "not a regular file", path)
        finalize(self, os.close, self.descriptor).atexit = False

    def version(self) -> FileVersion:
        """Look up the version of the open file."""
        return version_of(os.fstat(self.descriptor))

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes. Raises ValueError if the file is too short."""
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
        """Fill ``out``, a row from each start on. Raises as ``read``."""
        descriptor, preadv = self.descriptor, os.preadv
        for at, start in zip(range(0, len(out), nbytes), starts, strict=True):
            part = out[at : at + nbytes]
            if preadv(descriptor, (part,), start) < nbytes:
                part[:] = self.read(start, nbytes)


class SeekableFile(io.RawIOBase):
    """A file object over parts of a file, which ``read(start, nbytes)`` returns."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size, self._read_part = size, read
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

    def readinto(self, buffer: Any) -> int:
        nbytes = max(0, min(len(buffer), self._size - self._at))
        data = self._read_part(self._at, nbytes) if nbytes else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class PartialFile:
    """A file, local or at a URL, that one thread reads in parts.

    ``reads_ahead``: whether each read fetches ``READ_AT_LEAST`` bytes, as for storage that takes a
    request for each. Otherwise only one near the last: slow disks then need one seek.
    """

    def __init__(
        self,
        path: str,
        version: FileVersion,
        read: Callable[[int, int], bytes],
        *,
        reads_ahead: bool,
    ) -> None:
        self.path, self.version = path, version
        self._read, self._reads_ahead = read, reads_ahead
        self._held, self._start, self._last = b"", 0, -READ_AT_LEAST

    @classmethod
    def at(cls, path: str) -> PartialFile:
        """Open a local file."""
        file = OpenFile(path)
        return cls(path, file.version(), file.read, reads_ahead=False)

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes; what is read behind them is kept for the next call."""
        within = start - self._start
        if not 0 <= within <= len(self._held) - nbytes:
            is_near = self._reads_ahead or 0 <= start - self._last < READ_AT_LEAST
            ahead = min(READ_AT_LEAST, self.version.size_bytes - start) if is_near else 0
            self._start, within = start, 0
            self._held = self._read(start, max(nbytes, ahead))
        self._last = start
        return self._held[within : within + nbytes]

    def as_file(self) -> io.BufferedReader:
        """Return a file object."""
        return io.BufferedReader(SeekableFile(self.version.size_bytes, self.read))


def for_each(
    paths: Sequence[str],
    look: Callable[[str], T],
    at_once: int,
    show: Callable[[Sequence[T], int], bool] = lambda found, of: False,
) -> list[T]:
    """Return the results of ``look`` for each path, called by so many threads at once.

    Raises the error of the first path that has one. ``show`` is called every two seconds with the
    first results and the number of all paths; where it has shown these, at the end with all.
    """
    results: list[OneShot[T]] = [OneShot() for _ in paths]
    numbers = itertools.count()  # each is taken by one thread
    given_up = False

    def run() -> None:
        while not given_up and (number := next(numbers)) < len(paths):
            try:
                results[number].give(look(paths[number]))
            except BaseException as error:
                results[number].give(error=error)

    threads = [start_thread(f"stoker-look-{n}", run) for n in range(min(at_once, len(paths)))]
    is_shown = False
    found: list[T] = []
    due_s = time.monotonic() + _SHOW_EVERY_S
    try:
        for result in results:
            while True:
                try:
                    found.append(result.wait(max(0.0, due_s - time.monotonic())))
                    break
                except TimeoutError:
                    is_shown = show(found, len(paths)) or is_shown
                    due_s = time.monotonic() + _SHOW_EVERY_S
    finally:
        given_up = True
    for thread in threads:
        thread.join()
    if is_shown:
        show(found, len(paths))
    return found
