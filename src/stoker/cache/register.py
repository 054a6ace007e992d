"""Where this user's stores on disks lie, for ``stoker cache list``: a link to each."""

from __future__ import annotations

import contextlib
import os

import xxhash


def paths() -> list[str]:
    """Return the paths of the stores that were made on disks; some may be gone."""
    found = []
    with contextlib.suppress(OSError):  # nothing was made yet, or there is no home
        for name in os.listdir(_folder()):
            with contextlib.suppress(OSError):
                found.append(os.readlink(os.path.join(_folder(), name)))
    return sorted(found)


def add(path: str) -> None:
    """Take note of a store."""
    with contextlib.suppress(OSError):  # without a home it is not listed
        os.makedirs(_folder(), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(path, _link(path))


def forget(path: str) -> None:
    """Take note that a store is gone."""
    with contextlib.suppress(OSError):
        os.unlink(_link(path))


def _folder() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "stoker", "caches")


def _link(path: str) -> str:
    return os.path.join(_folder(), xxhash.xxh3_64_hexdigest(path.encode()))
