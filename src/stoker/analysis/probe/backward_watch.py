"""Detects training without a loader by its backward passes, until a loader is iterated."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .records import write_json

_RUN = "_engine_run_backward"  # what backward() and grad() call
# A file is written at most so often: a step's backward pass is not to wait for it.
_EVERY_S = 0.5

_undo: list[Callable[[], None]] = []


def watch_backward(autograd: ModuleType, folder: str) -> None:
    """Note when this process first and last computed gradients, in ``loaderless-PID.json``."""
    run = getattr(autograd, _RUN, None)
    if run is None:
        return
    first = noted = 0.0

    @functools.wraps(run)
    def hook(*args: Any, **kwargs: Any) -> Any:
        nonlocal first, noted
        now = time.monotonic()
        first = first or now
        if now - noted > _EVERY_S:
            noted = now
            with contextlib.suppress(OSError):
                write_json(os.path.join(folder, f"loaderless-{os.getpid()}.json"), [first, now])
        return run(*args, **kwargs)

    setattr(autograd, _RUN, hook)
    _undo.append(lambda: setattr(autograd, _RUN, run))


def stop_watching() -> None:
    """Stop watching, as a loader is iterated."""
    while _undo:
        _undo.pop()()
