"""The places of stores, in memory or on a local disk, and the room that they may take."""

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
from stoker.basics.validate import is_whole_number
from stoker.basics.warn import warn
from stoker.cache.folder import CacheFolder
from stoker.cache.layout import PAGE_BYTES
from stoker.errors import CacheError, CacheWarning

# The smallest store: LMDB's own pages and one block of 64 KB take a good part of anything smaller.
LEAST_BYTES = 1 << 20
# The fractions of the free space that limit="auto" takes. The job needs the other half of memory,
# and other users need some of the disk. Chosen, not measured.
_AUTO_MEMORY, _AUTO_DISK = 0.5, 0.8
# The fraction of memory or disk that no store takes. Chosen, not measured.
_KEPT_FREE_FRACTION = 0.05
_NETWORK = re.compile(r"nfs|cifs|smb|9p|lustre|gpfs|ceph|gluster|fuse\.(?!fuseblk|ext)")

_USE_LOCAL_DISK = "put the cache on a local disk with path= (for a cache server: --folder)"
_MEMORY_REMEDY = (
    "Give the container more shared memory (docker run --shm-size=64g, or --ipc=host; in "
    f"Kubernetes an emptyDir with medium: Memory at /dev/shm), or {_USE_LOCAL_DISK}"
)
_DISK_REMEDY = "Give path= on a local disk with free space to which this user may write"

Limit = int | str
"""Bytes, a share of memory or of the disk such as ``"50%"``, or ``"auto"``."""


def memory_folder() -> str:
    """Return the folder of stores in memory: on tmpfs, for this user only."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(root, f"stoker-{os.getuid()}")


def is_in_memory(path: str) -> bool:
    """True if a store is in memory."""
    return os.path.dirname(path) == memory_folder()


def make_memory_folder() -> str:
    """Make the folder of stores in memory. Raises CacheError if that fails, or if another user owns
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
    """Return the error for a store that cannot be made, with the cause and the remedy."""
    reason = error.strerror or str(error).rpartition(": ")[2]  # LMDB puts paths in front
    parent = os.path.dirname(path)
    remedy = _MEMORY_REMEDY if in_memory else _DISK_REMEDY
    if in_memory and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        remedy = f"Mount /dev/shm so that this user may write to it, or {_USE_LOCAL_DISK}"
    return CacheError(f"cannot make a cache in {parent}: {reason}. {remedy}")


def check_memory_folder() -> None:
    """Raise CacheError if others may access the folder of stores in memory, or made it."""
    try:
        with CacheFolder(memory_folder()) as memory:
            memory.check_owner(private=True)
    except FileNotFoundError:
        pass
    except OSError:
        raise CacheError(
            f"{memory_folder()} does not belong to this user alone: another user has made it, or "
            "it is not a folder. Remove it"
        ) from None


def local_folder(path: str | os.PathLike[str]) -> str:
    """Return a folder of a store by its whole name.

    Raises TypeError for an object that names none, ValueError for a folder on a network file
    system: LMDB's locks do not work there.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path= is a folder on a local disk, such as '/scratch/x', not {path!r}")
    folder = os.path.realpath(os.path.expanduser(path))
    kind = _file_system(folder)
    if _NETWORK.match(kind):
        raise ValueError(
            f"path={folder!r} is on a network file system ({kind}): give a path on a local disk"
        )
    return folder


def list_store(path: str) -> None:
    """Add a store on a disk to this user's list, a folder of links for ``stoker cache list``."""
    with contextlib.suppress(OSError):  # a user without a home has no list
        os.makedirs(_list_folder(), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(path, _link(path))


def unlist_store(path: str) -> None:
    """Remove a store from the list."""
    with contextlib.suppress(OSError):
        os.unlink(_link(path))


def list_stores() -> list[str]:
    """Return the paths on the list; some of the stores may be gone."""
    found = []
    with contextlib.suppress(OSError):  # there is no list yet
        for name in os.listdir(_list_folder()):
            with contextlib.suppress(OSError):
                found.append(os.readlink(os.path.join(_list_folder(), name)))
    return sorted(found)


def parse_limit(limit: object) -> Limit:
    """Check and parse ``limit=``: return bytes, a share such as ``"50%"``, or ``"auto"``.

    Raises TypeError or ValueError, with examples.
    """
    if isinstance(limit, str):
        if limit == "auto" or resources.parse_share(limit):
            return limit
        size = resources.parse_bytes(limit)
    elif is_whole_number(limit):
        size = int(limit)
    else:
        raise TypeError(
            "a cache's limit is a size in bytes or as text ('64GiB'), a share of memory as text "
            f"('50%'), or 'auto', not {limit!r}"
        )
    if size < LEAST_BYTES:
        raise ValueError(
            f"limit={limit!r}: a cache needs at least {format_bytes(LEAST_BYTES)}. Write a size "
            "such as '8GiB', or a share of memory such as '50%'"
        )
    return size


def resolve_limit(limit: Limit, folder: str, *, in_memory: bool) -> int:
    """Return the limit in bytes of a store in ``folder``, in whole pages.

    If there is less room than requested, return less, and warn with the remedy. Return 0 if there
    is no room at all.
    """
    disk = folder
    while not os.path.exists(disk):
        disk = os.path.dirname(disk)
    usage = shutil.disk_usage(disk)
    free = int(usage.free - _KEPT_FREE_FRACTION * usage.total)
    total_usable = resources.usable_memory_bytes() if in_memory else usage.free
    room = min(free, int(total_usable * (1 - _KEPT_FREE_FRACTION))) if in_memory else free
    if limit == "auto":
        size = int(room * (_AUTO_MEMORY if in_memory else _AUTO_DISK))
        if in_memory and free < total_usable * _AUTO_MEMORY:
            size = free
            _warn_small(f"of {format_bytes(max(0, size))}", usage.total, disk)
    else:
        share = resources.parse_share(limit) if isinstance(limit, str) else None
        size = int(limit) if share is None else int(share * total_usable)
        if size > room:
            actual, requested = format_bytes(max(0, room)), format_bytes(size)
            if in_memory and free < total_usable:
                _warn_small(f"of {actual}, not {requested}", usage.total, disk)
            else:
                remedy = "memory" if in_memory else f"room on {disk}"
                warn(
                    f"the cache gets {actual} instead of {requested}: there is no more {remedy}. "
                    "limit='auto' avoids this warning",
                    CacheWarning,
                )
            size = room
    return max(0, size) // PAGE_BYTES * PAGE_BYTES if size >= LEAST_BYTES else 0


def _warn_small(size: str, total: int, disk: str) -> None:
    warn(
        f"the cache can only be {size}: {disk} holds {format_bytes(total)} (64 MiB is the default "
        f"in containers). {_MEMORY_REMEDY}",
        CacheWarning,
    )


def _file_system(folder: str) -> str:
    import psutil

    mounts = []
    with contextlib.suppress(OSError):
        mounts = psutil.disk_partitions(all=True)
    target = Path(os.path.realpath(folder))
    around = [mount for mount in mounts if target.is_relative_to(mount.mountpoint)]
    around.sort(key=lambda mount: len(mount.mountpoint))  # the longest mount point wins
    return around[-1].fstype if around else ""


def _list_folder() -> str:
    return os.path.join(
        resources.user_folder("XDG_STATE_HOME", "~/.local/state"), "stoker", "caches"
    )


def _link(path: str) -> str:
    return os.path.join(_list_folder(), xxhash.xxh3_64_hexdigest(path.encode()))
