"""Questions to all frameworks at once, for the rest of the package."""

from __future__ import annotations

from typing import Any

from stoker.frameworks.accelerate import Accelerate
from stoker.frameworks.framework import EpochListener, Framework, RunningEpoch, TrainingLoop
from stoker.frameworks.keras import Keras
from stoker.frameworks.lightning import Lightning
from stoker.frameworks.ray_train import RayTrain
from stoker.frameworks.torch_checkpoint import TorchCheckpoint

# Frameworks that call come before frameworks that are only present: a Trainer of Lightning may run
# in Ray.
_ALL: tuple[Framework, ...] = (Lightning(), Keras(), Accelerate(), RayTrain(), TorchCheckpoint())
_PLAIN = TrainingLoop()


def calling_loop() -> TrainingLoop:
    """Return the loop that is calling; the user's own if it is no framework's."""
    return next((loop for each in _ALL if (loop := each.loop()) is not None), _PLAIN)


def sharding_framework() -> Framework | None:
    """Return the framework that shards the data, or None."""
    return next((each for each in _ALL if each.shards_data()), None)


def framework_with_one_state() -> str | None:
    """Return the name of a framework that saves one rank's state for all ranks, or None."""
    return next((each.name for each in _ALL if each.keeps_one_state()), None)


def wrap_state(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a pipeline's state in the form that the saving framework needs."""
    for each in _ALL:
        saved = each.wrap_state(saved)
    return saved


def unwrap_state(saved: Any) -> Any:
    """Return a pipeline's state from the result of ``wrap_state``."""
    for each in _ALL:
        saved = each.unwrap_state(saved)
    return saved


def epoch_listener(epoch: RunningEpoch) -> EpochListener | None:
    """Return the listener of an epoch that begins, or None."""
    found = (each.listener(epoch) for each in _ALL)
    return next((listener for listener in found if listener is not None), None)


def framework_mesh() -> Any:
    """Return the device mesh that a framework has set up, or None."""
    return next((mesh for each in _ALL if (mesh := each.mesh()) is not None), None)
