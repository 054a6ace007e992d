"""Local files: which of them are examples, and how they are read without blocking."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence

from stoker import machine
from stoker.caution import warn

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
_LARGE_BYTES = 1 << 28  # smaller ones are read without asking for free memory
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
    if nbytes > _LARGE_BYTES and nbytes > machine.usable_memory_bytes():
        size = machine.format_bytes(nbytes)
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
