"""What this process has open: tests ask what came to it, as others' may go at any time.

A count is not enough: fsspec's connections to servers of earlier tests close seconds later.
"""

from __future__ import annotations

import contextlib
import os

import pytest

RAISED = pytest.StashKey[bool]()
"""Of a test: whether it has raised. What it leaves open then is not looked at."""


def open_descriptors() -> set[tuple[str, str, int]]:
    """Return the number, target and inode of each open descriptor."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((number, os.readlink(path), os.stat(path).st_ino))
    return found
