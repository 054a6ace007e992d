"""The lock of users' own objects: one thread at a time calls them while worker threads run."""

from __future__ import annotations

import os
import re
import threading
from typing import Any

USER_LOCK = threading.RLock()
"""Held for each call of an original while worker threads run."""

# With the methods that a Condition calls, which have no types.
_LOCK: Any = USER_LOCK


def is_held() -> bool:
    """True if the calling thread holds the lock."""
    return bool(_LOCK._is_owned())


def owner() -> int | None:
    """Return the thread that holds the lock; its text alone tells."""
    found = re.search(r"owner=(\d+)", repr(USER_LOCK))
    return int(found[1]) if found and found[1] != "0" else None


def let_go() -> Any:
    """Release the lock if the calling thread holds it; return its saved count, or None."""
    return _LOCK._release_save() if is_held() else None


def take_back(held: Any) -> None:
    """Acquire the lock again, as often as before ``let_go``."""
    if held is not None:
        _LOCK._acquire_restore(held)


def _in_child() -> None:
    if not is_held():  # a thread of the parent may hold it, for ever
        _LOCK._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
