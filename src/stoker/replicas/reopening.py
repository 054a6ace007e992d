"""Files that are open for reading, opened anew: a forked child shares their place otherwise.

Whoever reads after a fork moves the place where all others read next. So a worker process gives
every descriptor of a file that is only read a place of its own, under its old number: whatever
uses it, Python's files, archives, and libraries in C alike, does not notice.
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
    """Return the descriptors of regular files that are open for reading alone, and their places.

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


def reopen(places: Mapping[int, int]) -> None:
    """Open these files anew, each under its number and at its place. Called in the child, first.

    It needs no look at the user's objects: they hold the same numbers. A file that cannot be
    opened again (its owner is another user by now) stays as it is.
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
