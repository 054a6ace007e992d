"""Questions to all frameworks at once, for the rest of the package."""

from __future__ import annotations

from typing import Any

from stoker.frameworks.accelerate import Accelerate
from stoker.frameworks.accelerate import EpochListener as EpochListener
from stoker.frameworks.framework import Framework, RunningEpoch
from stoker.frameworks.keras import Keras
from stoker.frameworks.lightning import Lightning
from stoker.frameworks.lightning import TrainingLoop as TrainingLoop
from stoker.frameworks.ray_train import RayTrain
from stoker.frameworks.torch_checkpoint import unwrap_state as unwrap_state
from stoker.frameworks.torch_checkpoint import wrap_state as wrap_state

# Frameworks that call come before frameworks that are only present: a Trainer of Lightning may run
# in Ray.
_LIGHTNING, _ACCELERATE = Lightning(), Accelerate()
_ALL: tuple[Framework, ...] = (_LIGHTNING, Keras(), _ACCELERATE, RayTrain())


def calling_loop() -> TrainingLoop:
    """Return the loop that is calling; the user's own if it is no framework's."""
    return _LIGHTNING.loop()


def sharding_framework() -> Framework | None:
    """Return the framework that shards the data, or None."""
    return next((each for each in _ALL if each.shards_data()), None)


def framework_with_one_state() -> str | None:
    """Return the name of a framework that saves one rank's state for all ranks, or None."""
    return next((each.name for each in _ALL if each.keeps_one_state()), None)


def epoch_listener(epoch: RunningEpoch) -> EpochListener | None:
    """Return the listener of an epoch that begins, or None."""
    return _ACCELERATE.listener(epoch)


def framework_mesh() -> Any:
    """Return the device mesh that a framework has set up, or None."""
    return _ACCELERATE.mesh()
