"""Which framework is at work: told by whose code calls, or by what it has set up.

Frameworks do not say who they are. Nothing here imports one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from stoker.machine import rank_in_ray

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")


def _frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the calling frames with the names of their modules, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back


def reads_ahead() -> str | None:
    """Name the framework whose fetcher is calling, if one is.

    Lightning's reads a batch ahead of the trainer where there is no ``len()``.
    """
    for module, _ in _frames():
        if module.startswith(_LIGHTNING) and module.endswith(".loops.fetchers"):
            return "Lightning"
    return None


def overfits() -> bool:
    """Return whether Lightning is calling, and wants the same batches in every epoch."""
    for module, frame in _frames():
        if module.startswith(_LIGHTNING) and ".loops." in module:
            trainer = getattr(frame.f_locals.get("self"), "trainer", None)
            if trainer is not None:
                return bool(getattr(trainer, "overfit_batches", 0))
    return False


def distributing() -> str | None:
    """Name the framework that gives each rank its part of the data, if one is at work."""
    for module, _ in _frames():
        if module.startswith(_LIGHTNING):
            return "Lightning"
        if module.startswith("keras."):
            return "Keras"
    state: Any = sys.modules.get("accelerate.state")
    if state is not None and state.AcceleratorState._shared_state:
        return "Accelerate"
    return None if rank_in_ray() is None else "Ray Train"


def keeps_one_state() -> str | None:
    """Name the framework that is asking for one rank's state, to give it to all of them later."""
    for module, _ in _frames():
        if module.startswith(_LIGHTNING):
            return "Lightning"
        if module == "accelerate.checkpointing":
            return "Accelerate"
    return None


def is_calling(module_prefix: str) -> bool:
    """Return whether code of such a module is calling."""
    return any(module.startswith(module_prefix) for module, _ in _frames())
