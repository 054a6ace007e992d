"""Counts the script's backward passes, which tell training from evaluation.

Some loops evaluate on the loader that they train on, and with gradients on while they ask for a
batch (Ignite's).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

_RUN = "_engine_run_backward"  # what backward() and grad() call

_passes = 0


def watch_backward(autograd: ModuleType) -> None:
    """Count the passes of this process from here on."""
    run = getattr(autograd, _RUN, None)
    if run is None:
        return

    @functools.wraps(run)
    def hook(*args: Any, **kwargs: Any) -> Any:
        global _passes
        _passes += 1
        return run(*args, **kwargs)

    setattr(autograd, _RUN, hook)


def count_passes() -> int:
    """Return how many backward passes this process has begun."""
    return _passes
