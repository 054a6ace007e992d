"""``stoker-native``, the optional library in C that decodes crops and reads windows of tokens."""

from __future__ import annotations

import functools
from types import ModuleType


@functools.cache
def library() -> ModuleType | None:
    """Return the module ``stoker_native``, or None if it is not installed.

    Raises ImportError if it is installed but cannot be loaded.
    """
    try:
        import stoker_native
    except ModuleNotFoundError:
        return None
    return stoker_native
