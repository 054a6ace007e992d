"""Warnings that name the caller's line, however deep in the package they arise."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from types import FrameType

_INSIDE = (os.path.dirname(os.path.abspath(__file__)) + os.sep, threading.__file__)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first frame outside of this package (in a worker thread: at its own)."""
    frame: FrameType | None = sys._getframe(1)
    here = frame
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    frame = frame or here
    assert frame is not None
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
        source=None,
    )
