"""The journal of a pack run: the list of finished shards, in the folder of the shards.

One run at a time locks the folder. A run removes files only from a folder with a journal: a folder
without one may hold the user's files.
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
def lock_folder(folder: str) -> Iterator[None]:
    """Lock a folder for this run; the kernel ends the lock with the process.

    Raises ValueError if another run has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run of stoker pack writes to {folder}: wait for it, or end it"
            ) from None
        yield
    finally:
        os.close(descriptor)


def read_journal(folder: str, description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the finished shards, and remove the unfinished shard of a killed run.

    Raises ValueError if the folder holds other files, shards of another source, or changed shards.
    """
    journal, manifest = (os.path.join(folder, name) for name in (_JOURNAL, MANIFEST))
    path = journal if os.path.exists(journal) else manifest
    names = set(os.listdir(folder)) - {_NEW}
    if not os.path.exists(path):
        if names:
            raise ValueError(
                f"{folder} holds other files, such as {min(names)!r}: give an empty or new folder"
            )
        write_journal(folder, description, [])
        return []
    try:
        with open(path) as file:
            contents = json.load(file)
        shards: list[dict[str, Any]] = contents.pop("shards")
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove {folder}, and pack again") from error
    if contents != description and path == journal and not shards:
        write_journal(folder, description, [])
    elif contents != description:
        differ = ", ".join(
            sorted(key for key in description if contents.get(key) != description[key])
        )
        raise ValueError(
            f"{folder} holds shards of another source or with other settings ({differ} differ): "
            "remove the folder, or give another one"
        )
    if path == journal:
        # A run that was killed between the rename of a shard and its entry in the journal.
        next_one = f"shard-{len(shards):06}"
        for name in names:
            if name.startswith(PART) or os.path.splitext(name)[0] == next_one:
                os.unlink(os.path.join(folder, name))
    for shard in shards:
        path = os.path.join(folder, shard["name"])
        if not os.path.isfile(path) or os.stat(path).st_size != shard["bytes"]:
            raise ValueError(f"{path} is missing or has changed: remove {folder}, and pack again")
    return shards


def write_journal(
    folder: str, description: Mapping[str, Any], shards: list[dict[str, Any]]
) -> None:
    """Write the list of finished shards to the journal."""
    _write(folder, _JOURNAL, {**description, "shards": shards})


def write_manifest(
    folder: str, description: Mapping[str, Any], shards: list[dict[str, Any]]
) -> None:
    """Write the list of all shards to ``shards.json``, and remove the journal."""
    _write(folder, MANIFEST, {**description, "shards": shards})
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, _JOURNAL))


def sync_folder(folder: str) -> None:
    """Flush a folder's entries to the disk."""
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
