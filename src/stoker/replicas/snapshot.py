"""Tells whether a process that imports the program would get the same if it were started now.

Such a process has what is pickled for it, the environment and the folder, and nothing else of the
program's state.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
from typing import Any

import numpy as np
import xxhash


@dataclasses.dataclass(frozen=True)
class PickleSnapshot:
    """The pickled dataset that is sent to processes that import the program.

    Attributes:
        roots: the objects.
        unknown: why it cannot be told whether that changes; "" if it can.
        digest, settings: what they were.
    """

    roots: Any
    unknown: str
    digest: bytes = b""
    settings: tuple[Any, ...] = ()

    @classmethod
    def of(cls, roots: Any) -> PickleSnapshot:
        """Return the snapshot of objects that can be pickled, or what says why they cannot be."""
        try:
            return cls(roots, "", _digest_of(roots), _settings())
        except Exception as error:  # of the user's own classes, or of what is only inherited
            return cls(roots, f"{type(error).__name__}: {error}")

    def is_current(self) -> bool:
        """True if the same would be pickled now; False if that is unknown."""
        try:
            return (
                not self.unknown
                and _settings() == self.settings
                and _digest_of(self.roots) == self.digest
            )
        except Exception:
            return False


class _Hash:
    """A file that keeps a digest of what is written to it."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return memoryview(data).nbytes

    def digest(self) -> bytes:
        return self._hash.digest()


def _digest_of(x: Any) -> bytes:
    found = _Hash()
    pickle.Pickler(found, pickle.HIGHEST_PROTOCOL).dump(x)
    return found.digest()


def _settings() -> tuple[Any, ...]:
    """Return what a process takes over beside Python's objects."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        folder = ""
    dtype = getattr(sys.modules.get("torch"), "get_default_dtype", None)
    return folder, dict(os.environ), list(sys.path), np.geterr(), dtype and dtype()
