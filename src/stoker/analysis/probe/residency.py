"""Measures how much of a file is in the page cache, and drops it from there."""

from __future__ import annotations

import ctypes
import mmap
import os

_PAGE = mmap.PAGESIZE


def resident_pages(path: str) -> tuple[int, int] | None:
    """Return (pages of the file in the page cache, pages of the file).

    None if the kernel does not tell: the file is another user's and cannot be written (mincore then
    reports all pages). Raises OSError if the file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_size == 0:
            return 0, 0
        if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        pages = (status.st_size + _PAGE - 1) // _PAGE
        libc = ctypes.CDLL(None, use_errno=True)
        # By default ctypes takes addresses for C ints, and cuts off half of their bits.
        libc.mmap.restype = ctypes.c_void_p
        word, number = ctypes.c_size_t, ctypes.c_int
        libc.mmap.argtypes = (ctypes.c_void_p, word, number, number, number, ctypes.c_long)
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        address = libc.mmap(None, status.st_size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        try:
            flags = ctypes.create_string_buffer(pages)
            if libc.mincore(address, status.st_size, flags) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        finally:
            libc.munmap(address, status.st_size)
        return sum(flag & 1 for flag in flags.raw), pages
    finally:
        os.close(fd)


def drop(path: str) -> None:
    """Ask the kernel to drop a file from the page cache; pages that are mapped somewhere stay.

    Dirty pages are written first. Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
