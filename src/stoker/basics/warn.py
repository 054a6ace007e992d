"""Warnings that point at the user's line, however deep in the package they arise; and stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import FrameType
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
# Without a venv these folders are inside the standard library's.
_INSTALLED = ("site-packages", "dist-packages")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first frame outside this package and the standard library, if there is one."""
    here = sys._getframe(1)
    frame: FrameType | None = here
    while frame is not None:
        path = frame.f_code.co_filename
        if not (path.startswith("<frozen ") or is_inside_package(path) or is_inside_library(path)):
            break
        frame = frame.f_back
    place = frame or here
    warnings.warn_explicit(
        message,
        category,
        place.f_code.co_filename,
        place.f_lineno,
        place.f_globals.get("__name__"),
        place.f_globals.setdefault("__warningregistry__", {}),
    )


def say(text: str) -> None:
    """Print a line to stderr, if a script has left one that works; above its progress bars."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            tqdm: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
            if getattr(tqdm, "_instances", None):
                tqdm.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)


def is_inside_package(path: str) -> bool:
    return path.startswith(_PACKAGE)


def is_inside_library(path: str) -> bool:
    rest = path.removeprefix(_STANDARD_LIBRARY)
    return rest != path and not rest.startswith(_INSTALLED)
