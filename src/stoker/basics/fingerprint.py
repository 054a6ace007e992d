"""What tells one item of a source from another."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NamedTuple

_RENUMBERING = {"vfat", "msdos", "exfat", "cifs", "smb3"}


class Fingerprint(NamedTuple):
    """What tells the content of an example from that of others, and from its own former one."""

    name: str | bytes | int
    """Within its source: a path, or an index."""
    size_bytes: int = -1
    """Of its file; -1 where there is none, or its server does not tell."""
    version: int = 0
    """Of its file: when it was modified (ns), or a digest of what its server tells; 0: unknown."""
    label: int = 0
    """What its source adds to the file's content."""
    changed_ns: int = 0
    """When its local file was changed in any way, which no tool can set back."""
    inode: int = 0
    """Of its local file, where its file system goes on numbering it so."""


def of_file(name: str, found: os.stat_result, label: int = 0) -> Fingerprint:
    """Return the fingerprint of a local file as it was found."""
    inode = 0 if can_renumber(found.st_dev, _mounts()) else found.st_ino
    return Fingerprint(name, found.st_size, found.st_mtime_ns, label, found.st_ctime_ns, inode)


@functools.cache
def can_renumber(device: int, mounts: str) -> bool:
    """Tell whether a file system may number files anew: those of user space, FAT and CIFS do.

    ``mounts`` is what is mounted, as in ``/proc/self/mountinfo``.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        if before.split(" ")[2:3] == [number]:
            return behind.startswith("fuse") or behind.split(" ")[0] in _RENUMBERING
    return False


@functools.cache
def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""
