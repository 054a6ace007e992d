"""``stoker-native``, the optional library in C that decodes crops and reads windows."""

from __future__ import annotations

import functools
from types import ModuleType


@functools.cache
def library() -> ModuleType | None:
    """Return ``stoker_native``, or None where this optional library is not installed.

    Raises ImportError where it is installed and cannot be loaded.
    """
    try:
        import stoker_native
    except ModuleNotFoundError:
        return None
    return stoker_native
