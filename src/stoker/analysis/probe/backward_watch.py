"""Counts the script's backward passes, which tell training from evaluation.

Some loops evaluate on the loader that they train on, and with gradients on while they ask for a
batch (Ignite's). Training without any loader is detected by its passes, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from types import ModuleType
from typing import Any

from .records import write_json

_RUN = "_engine_run_backward"  # what backward() and grad() call
# A file is written at most so often: a step's backward pass is not to wait for it.
_EVERY_S = 0.5

_passes = 0
_is_loaderless = True  # no loader was iterated yet


def watch_backward(autograd: ModuleType, folder: str | None = None) -> None:
    """Count the passes of this process from here on.

    Until a loader is iterated, also note when the first and the last one was, in the folder's
    ``loaderless-PID.json``.
    """
    run = getattr(autograd, _RUN, None)
    if run is None:
        return
    first = noted = 0.0

    @functools.wraps(run)
    def hook(*args: Any, **kwargs: Any) -> Any:
        nonlocal first, noted
        global _passes
        _passes += 1
        if _is_loaderless and folder is not None:
            now = time.monotonic()
            first = first or now
            if now - noted > _EVERY_S:
                noted = now
                with contextlib.suppress(OSError):
                    write_json(os.path.join(folder, f"loaderless-{os.getpid()}.json"), [first, now])
        return run(*args, **kwargs)

    setattr(autograd, _RUN, hook)


def count_passes() -> int:
    """Return how many backward passes this process has begun."""
    return _passes


def note_loader() -> None:
    """Note that a loader is iterated."""
    global _is_loaderless
    _is_loaderless = False
