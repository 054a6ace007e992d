"""The journal of a packing: its finished shards, in their folder, locked by one run at a time.

Files are removed from a folder only if a journal lists them as ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

MANIFEST = "shards.json"
PART = ".part-"
"""The prefix of a shard's name while it is written."""
_JOURNAL = ".packing.json"
_NEW = ".packing.json.new"


@contextlib.contextmanager
def alone_in(folder: str) -> Iterator[None]:
    """Lock a folder for this run; the kernel ends the lock with the process.

    Raises ValueError where another run holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another run is packing into it") from None
        yield
    finally:
        os.close(descriptor)


def read_journal(folder: str, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the finished shards, and remove a killed run's unfinished one.

    Raises ValueError where the folder holds other things, another packing, or changed shards.
    """
    journal, manifest = (os.path.join(folder, name) for name in (_JOURNAL, MANIFEST))
    path = journal if os.path.exists(journal) else manifest
    there = set(os.listdir(folder)) - {_NEW}
    if not os.path.exists(path):
        if there:
            raise ValueError(f"{folder} holds other things ({min(there)!r}): take an empty folder")
        write_journal(folder, about, [])
        return []
    try:
        with open(path) as file:
            found = json.load(file)
        shards: list[dict[str, Any]] = found.pop("shards")
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: remove {folder}, and pack anew: {error}") from error
    if found != about and path == journal and not shards:
        write_journal(folder, about, [])
    elif found != about:
        differ = ", ".join(sorted(key for key in about if found.get(key) != about[key]))
        raise ValueError(f"{folder} holds another packing ({differ}): remove it, or take another")
    if path == journal:
        next_one = f"shard-{len(shards):06}"  # it was renamed, and not yet entered
        for name in there:
            if name.startswith(PART) or os.path.splitext(name)[0] == next_one:
                os.unlink(os.path.join(folder, name))
    for shard in shards:
        at = os.path.join(folder, shard["name"])
        if not os.path.isfile(at) or os.stat(at).st_size != shard["bytes"]:
            raise ValueError(f"{at} is gone or was changed: remove {folder}, and pack anew")
    return shards


def write_journal(folder: str, about: Mapping[str, Any], shards: list[dict[str, Any]]) -> None:
    """Write the finished shards into the journal."""
    _write(folder, _JOURNAL, {**about, "shards": shards})


def write_manifest(folder: str, about: Mapping[str, Any], shards: list[dict[str, Any]]) -> None:
    """Write the list of shards, in place of the journal."""
    _write(folder, MANIFEST, {**about, "shards": shards})
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, _JOURNAL))


def sync_folder(folder: str) -> None:
    """Flush a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(folder: str, name: str, content: Mapping[str, Any]) -> None:
    new = os.path.join(folder, _NEW)
    with open(new, "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, os.path.join(folder, name))
    sync_folder(folder)
