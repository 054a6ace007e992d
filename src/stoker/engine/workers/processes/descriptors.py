"""Files that a fork inherits: each worker process gets a read position of its own.

A forked process reopens every descriptor that is only read, under its old number, so Python's
files, archives and C libraries need not know.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Mapping

if sys.platform != "win32":
    import fcntl

_OPENED = "/proc/self/fd"


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
    reopened (for instance, its owner has changed) stays as it is.
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
