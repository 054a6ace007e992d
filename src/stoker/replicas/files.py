"""Reopens files that are open for reading, so that each worker has its own read position.

A worker thread gets a copy of each of the user's file objects. A forked worker process reopens
every descriptor that is only read, under its old number, so Python's files, archives and C
libraries need not know.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import sys
import weakref
from collections.abc import Mapping
from typing import Any

if sys.platform != "win32":
    import fcntl

FILES = (io.FileIO, io.BufferedReader, io.TextIOWrapper, gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile)
_OPENED = "/proc/self/fd"
_LOOKED_AT = 1 << 16  # bytes of a text, for line ends that a copy may see in another way
_REREAD = 64 << 20  # bytes of a compressed file that are read again to get where the original is


class NotReopened(Exception):
    """This file cannot be opened again; the message says why."""


def reopen_file(file: Any) -> Any:
    """Open a file again, at the position of the original. It is closed with its last reference."""
    if file in (sys.stdin, sys.stdout, sys.stderr) or file.closed:
        return file
    if isinstance(file, io.FileIO):
        return _raw(file)
    if isinstance(file, io.BufferedReader):
        if not isinstance(file.raw, io.FileIO):
            raise NotReopened("it does not read a file")
        again = io.BufferedReader(_raw(file.raw))
        again.seek(file.tell())
        return again
    if isinstance(file, io.TextIOWrapper):
        return _text(file)
    return _reopen_compressed(file)


def _raw(file: io.FileIO) -> io.FileIO:
    if not file.readable() or file.writable():
        raise NotReopened(f"it is open in mode {file.mode!r}")
    number = file.fileno()
    if not stat.S_ISREG(os.fstat(number).st_mode):
        raise NotReopened("it is not a regular file")
    name = file.name
    try:
        if isinstance(name, int) or not os.path.samestat(os.stat(name), os.fstat(number)):
            raise OSError
        opened = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, TypeError, ValueError):  # removed or replaced since
        try:
            opened = os.open(f"{_OPENED}/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotReopened(str(error)) from None
    again = io.FileIO(opened, "rb", closefd=False)  # with closefd it would warn when it is dropped
    weakref.finalize(again, os.close, opened)
    again.name = name
    again.seek(file.tell())
    return again


def _text(file: io.TextIOWrapper) -> io.TextIOWrapper:
    place = file.tell()
    if not isinstance(file.buffer, io.BufferedReader):
        raise NotReopened("it does not read a file")
    buffer = reopen_file(file.buffer)
    buffer.seek(0)
    if b"\r" in buffer.read(_LOOKED_AT):  # `newline=` cannot be asked for
        raise NotReopened("its lines end with a carriage return")
    buffer.seek(0)
    again = io.TextIOWrapper(buffer, file.encoding, file.errors)
    again.mode = file.mode  # type: ignore[misc]
    again.seek(place)
    return again


def _reopen_compressed(file: Any) -> Any:
    place = file.tell()
    if place > _REREAD:
        raise NotReopened("it stands far behind the beginning of a compressed file")
    if not file.readable():
        raise NotReopened("it is open for writing")
    inner = file.fileobj if isinstance(file, gzip.GzipFile) else file._fp
    if not isinstance(inner, (io.FileIO, io.BufferedReader)):
        raise NotReopened("it does not read a file")
    source = reopen_file(inner)
    source.seek(0)
    again: Any
    if isinstance(file, gzip.GzipFile):
        again = gzip.GzipFile(filename=file.name, mode="rb", fileobj=source)
    else:
        again = type(file)(source)
    again.seek(place)
    return again


def reading_places() -> Mapping[int, int]:
    """Return the descriptors of regular files open for reading only, and their positions.

    Called in the parent, right before it forks. Empty where there is no ``/proc``.
    """
    places: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_OPENED):
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                number = int(name)
                flags = fcntl.fcntl(number, fcntl.F_GETFL)
                if flags & os.O_ACCMODE == os.O_RDONLY and stat.S_ISREG(os.fstat(number).st_mode):
                    places[number] = os.lseek(number, 0, os.SEEK_CUR)
    return places


def reopen_descriptors(places: Mapping[int, int]) -> None:
    """Reopen files, each under its number and at its position. Called in the child, first.

    The user's objects hold the same numbers, so they need no change. A file that cannot be
    reopen_file (for instance, its owner has changed) stays as it is.
    """
    for number, place in places.items():
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~os.O_CREAT
            opened = os.open(f"{_OPENED}/{number}", flags | os.O_CLOEXEC)
            try:
                os.lseek(opened, place, os.SEEK_SET)
                os.dup2(opened, number, os.get_inheritable(number))
            finally:
                os.close(opened)
