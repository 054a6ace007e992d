"""How much a cache may take: what was asked for, and what there is."""

from __future__ import annotations

import os
import shutil

from stoker import machine
from stoker.cache.store import PAGE_BYTES
from stoker.caution import warn
from stoker.checks import is_number, is_whole_number
from stoker.errors import CacheWarning
from stoker.machine import format_bytes

LEAST_BYTES = 1 << 20
_AUTO_MEMORY, _AUTO_DISK = 0.5, 0.8
_KEPT_FREE = 0.05  # of memory or disk, for everything else

Limit = int | float | str


def check_limit(limit: object) -> Limit:
    """Read ``limit=``. Raises TypeError or ValueError, with examples."""
    if isinstance(limit, str):
        size: Limit = limit if limit == "auto" else machine.parse_bytes(limit)
    elif is_number(limit):
        size = int(limit) if is_whole_number(limit) else float(limit)
    else:
        raise TypeError(
            f"a cache's limit is a size such as '64GiB', a share of memory such as 0.5, or 'auto'; "
            f"not {limit!r}"
        )
    if isinstance(size, float) and not 0 < size <= 1:
        raise ValueError(f"limit={limit!r}: a share of memory lies between 0.0 and 1.0")
    if isinstance(size, int) and size < LEAST_BYTES:
        raise ValueError(f"limit={limit!r}: a cache takes at least {format_bytes(LEAST_BYTES)}")
    return size


def resolved(limit: Limit, folder: str, *, in_memory: bool) -> int:
    """Return the bytes that a store in ``folder`` may take, whole pages.

    Less than was asked for, with a warning that says what to do, where there is not so much.
    0 where there is room for nothing.
    """
    disk = _existing(folder)
    usage = shutil.disk_usage(disk)
    free = int(usage.free - _KEPT_FREE * usage.total)
    room = free
    if in_memory:
        memory = machine.usable_memory_bytes()
        room = min(free, int(memory * (1 - _KEPT_FREE)))
    if limit == "auto":
        size = int(room * (_AUTO_MEMORY if in_memory else _AUTO_DISK))
        if in_memory and free < memory * _AUTO_MEMORY:
            size = free
            _tell(f"of {format_bytes(max(0, size))}", usage.total, disk)
    else:
        of = memory if in_memory else usage.free
        size = int(limit * of) if isinstance(limit, float) else int(limit)
        if size > room:
            if in_memory and free < memory:
                _tell(
                    f"of {format_bytes(max(0, room))}, not {format_bytes(size)}", usage.total, disk
                )
            else:
                what = "memory" if in_memory else f"room on {disk}"
                warn(
                    f"the cache takes {format_bytes(max(0, room))} instead of "
                    f"{format_bytes(size)}: there is no more {what}. (limit='auto' asks for less)",
                    CacheWarning,
                )
            size = room
    return max(0, size) // PAGE_BYTES * PAGE_BYTES if size >= LEAST_BYTES else 0


def _tell(size: str, total: int, disk: str) -> None:
    warn(
        f"the cache can be {size}: {disk} holds {format_bytes(total)} only (containers have 64 MiB "
        "unless told otherwise). Give the container more (docker run --shm-size=64g, or "
        "--ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm), or put the cache "
        "on a local disk: path=",
        CacheWarning,
    )


def _existing(folder: str) -> str:
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder
