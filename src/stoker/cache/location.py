"""Locations of stores, in memory or on a local disk, and their limits in bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

import xxhash

from stoker.basics import resources
from stoker.basics.resources import format_bytes
from stoker.basics.validate import is_number, is_whole_number
from stoker.basics.warn import warn
from stoker.cache.folder import CacheFolder
from stoker.cache.layout import PAGE_BYTES
from stoker.errors import CacheError, CacheWarning

# LMDB's own pages and one pack of 64 KB take a good part of less.
LEAST_BYTES = 1 << 20
# Of the free space: the job needs the other half of memory; other users some of the disk. Chosen,
# not measured.
_AUTO_MEMORY, _AUTO_DISK = 0.5, 0.8
# Of memory or disk, for everything else. Chosen, not measured.
_KEPT_FREE = 0.05
_NETWORK = re.compile(r"nfs|cifs|smb|9p|lustre|gpfs|ceph|gluster|fuse\.(?!fuseblk|ext)")

_ELSEWHERE = "put the cache on a local disk: path= (of a keeper: --folder)"
_SHM = (
    "Give the container more (docker run --shm-size=64g, or --ipc=host; in Kubernetes an emptyDir "
    f"with medium: Memory at /dev/shm), or {_ELSEWHERE}"
)
_DISK = "Give path= on a local disk that has room, and that this user may write to"

Limit = int | float | str


def memory_folder() -> str:
    """Return the folder of stores in memory: this user's alone, on tmpfs."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(root, f"stoker-{os.getuid()}")


def is_in_memory(path: str) -> bool:
    """True if a store is in memory."""
    return os.path.dirname(path) == memory_folder()


def make_memory_folder() -> str:
    """Make the folder of stores in memory. Raises CacheError where that fails, or another user made
    it."""
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(memory_folder(), 0o700)
        except FileExistsError:
            raise
        except OSError as error:
            raise cannot_make(memory_folder(), error, in_memory=True) from error
    check_memory_folder()
    return memory_folder()


def cannot_make(path: str, error: OSError, *, in_memory: bool) -> CacheError:
    """Return the error for a store or folder that cannot be made: the cause and the remedy."""
    why = error.strerror or str(error).rpartition(": ")[2]  # LMDB puts paths in front
    parent = os.path.dirname(path)
    what = _SHM if in_memory else _DISK
    if in_memory and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        what = f"Mount /dev/shm so that this user may write to it, or {_ELSEWHERE}"
    return CacheError(f"no cache can be made in {parent}: {why}. {what}")


def check_memory_folder() -> None:
    """Raise CacheError where another user made the folder of stores in memory."""
    try:
        with CacheFolder(memory_folder()) as memory:
            memory.check_owner(alone=True)
    except FileNotFoundError:
        pass
    except OSError:
        raise CacheError(
            f"{memory_folder()} is not a folder of this user's alone: somebody else made it"
        ) from None


def check_local(folder: str) -> None:
    """Refuse a folder on a network file system, where LMDB's locks do not hold."""
    kind = _file_system(folder)
    if _NETWORK.match(kind):
        raise ValueError(
            f"path={folder!r} is on a network file system ({kind}): a cache needs a local disk"
        )


def remember(path: str) -> None:
    """Put a store on a disk on this user's list: a folder of links, for ``stoker cache list``."""
    with contextlib.suppress(OSError):  # without a home it is not listed
        os.makedirs(_list_folder(), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(path, _link(path))


def forget(path: str) -> None:
    """Take a store off the list."""
    with contextlib.suppress(OSError):
        os.unlink(_link(path))


def remembered() -> list[str]:
    """Return the paths on the list; some of the stores may be gone."""
    found = []
    with contextlib.suppress(OSError):  # nothing was made yet, or there is no home
        for name in os.listdir(_list_folder()):
            with contextlib.suppress(OSError):
                found.append(os.readlink(os.path.join(_list_folder(), name)))
    return sorted(found)


def parse_limit(limit: object) -> Limit:
    """Read ``limit=``. Raises TypeError or ValueError, with examples."""
    if isinstance(limit, str):
        size: Limit = limit if limit == "auto" else resources.parse_bytes(limit)
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


def resolve_limit(limit: Limit, folder: str, *, in_memory: bool) -> int:
    """Return the limit in bytes of a store in ``folder``, in whole pages.

    If there is less room than requested, it is lower, with a warning that names the remedy. 0 where
    there is no room at all.
    """
    disk = folder
    while not os.path.exists(disk):
        disk = os.path.dirname(disk)
    usage = shutil.disk_usage(disk)
    free = int(usage.free - _KEPT_FREE * usage.total)
    whole = resources.usable_memory_bytes() if in_memory else usage.free
    room = min(free, int(whole * (1 - _KEPT_FREE))) if in_memory else free
    if limit == "auto":
        size = int(room * (_AUTO_MEMORY if in_memory else _AUTO_DISK))
        if in_memory and free < whole * _AUTO_MEMORY:
            size = free
            _warn_small(f"of {format_bytes(max(0, size))}", usage.total, disk)
    else:
        size = int(limit * whole) if isinstance(limit, float) else int(limit)
        if size > room:
            got, asked = format_bytes(max(0, room)), format_bytes(size)
            if in_memory and free < whole:
                _warn_small(f"of {got}, not {asked}", usage.total, disk)
            else:
                what = "memory" if in_memory else f"room on {disk}"
                warn(
                    f"the cache takes {got} instead of {asked}: there is no more {what}. "
                    "(limit='auto' asks for less)",
                    CacheWarning,
                )
            size = room
    return max(0, size) // PAGE_BYTES * PAGE_BYTES if size >= LEAST_BYTES else 0


def _warn_small(size: str, total: int, disk: str) -> None:
    warn(
        f"the cache can be {size}: {disk} holds {format_bytes(total)} only (containers have 64 MiB "
        f"unless told otherwise). {_SHM}",
        CacheWarning,
    )


def _file_system(folder: str) -> str:
    import psutil

    mounts = []
    with contextlib.suppress(OSError):
        mounts = psutil.disk_partitions(all=True)
    target = Path(os.path.realpath(folder))
    around = [mount for mount in mounts if target.is_relative_to(mount.mountpoint)]
    around.sort(key=lambda mount: len(mount.mountpoint))  # the last one of a path is seen
    return around[-1].fstype if around else ""


def _list_folder() -> str:
    return os.path.join(
        resources.user_folder("XDG_STATE_HOME", "~/.local/state"), "stoker", "caches"
    )


def _link(path: str) -> str:
    return os.path.join(_list_folder(), xxhash.xxh3_64_hexdigest(path.encode()))
