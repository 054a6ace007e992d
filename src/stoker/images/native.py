"""``stoker-native``, the optional library in C: crops, PNGs, pixels, rows, windows of tokens."""

from __future__ import annotations

import functools
from types import ModuleType


@functools.cache
def library() -> ModuleType | None:
    """Return the module ``stoker_native``, or None if it is not installed.

    Raises ImportError if it is installed but cannot be loaded, or is too old.
    """
    try:
        import stoker_native
    except ModuleNotFoundError:
        return None
    if not hasattr(stoker_native, "random_crops"):  # the newest of its functions
        raise ImportError(
            f"stoker-native {stoker_native.__version__} is too old for this stoker: install the "
            "one that comes with it, pip install ./native"
        )
    return stoker_native
