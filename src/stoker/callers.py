"""Which framework is at work: told by whose code calls, or by what it has set up.

Frameworks do not say who they are. Nothing here imports one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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


def _fit_loop() -> Any:
    """Return Lightning's loop over epochs of training, None where it is not calling."""
    for module, frame in _frames():
        if module.startswith(_LIGHTNING) and module.endswith(".loops.fit_loop"):
            return frame.f_locals.get("self")
    return None


def ends_epoch() -> bool:
    """Return whether Lightning is calling, and is through with its epoch, however much it left."""
    loop = _fit_loop()
    if loop is None or not loop.epoch_loop.batch_progress.is_last_batch:
        return False
    return not _untrained(loop)


def untrained() -> int:
    """Return how many batches Lightning was handed that it is training on: it may never end."""
    loop = _fit_loop()
    return 0 if loop is None else _untrained(loop)


def _untrained(loop: Any) -> int:
    current = loop.epoch_loop.batch_progress.current
    fetched = getattr(getattr(loop, "_data_fetcher", None), "fetched", 0)
    return int(max(0, min(current.ready, fetched) - current.processed))


def left_aside(is_for: Callable[[Any], bool]) -> Any:
    """Return, once, the state in Lightning's checkpoint of the loader that this is true for.

    None where there is none, and where Lightning loads it itself: it does in the middle of an
    epoch. Behind a whole one it would have loaders begin with their first epoch again.
    """
    loop = _fit_loop()
    states = getattr(loop, "_combined_loader_states_to_load", None)
    if not states or loop.restarting:
        return None
    combined = getattr(getattr(loop, "_combined_loader", None), "flattened", ())
    loaders = [each for each in combined if hasattr(each, "load_state_dict")]
    for number, loader in enumerate(loaders):
        if is_for(loader) and len(loaders) == len(states):
            saved, states[number] = states[number], None
            return saved
    return None


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
