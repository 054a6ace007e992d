"""Accelerate: it shards loaders, keeps one state, and must know the last batch of an epoch.

``Accelerator.accumulate`` steps the optimizer after every n-th batch and after the last one of an
epoch. It finds the last one by asking the loader that began last and has not ended.
"""

from __future__ import annotations

import sys
from typing import Any

from stoker.basics.warn import warn
from stoker.frameworks.framework import Framework, RunningEpoch, is_calling

WRITTEN_FOR = "1.15"
"""The release whose private parts are read here; tests/frameworks/test_versions.py."""


class EpochListener:
    """Hears when an epoch begins and ends; stands for it among the loaders of Accelerate."""

    def __init__(self, epoch: RunningEpoch, gradients: Any) -> None:
        self._epoch = epoch
        self._gradients = gradients
        self._has_begun = False

    @property
    def end_of_dataloader(self) -> bool:
        """True if the batch handed out last is the last of the epoch."""
        return self._epoch.is_last

    @property
    def remainder(self) -> int:
        """The rows of the gathered last batches that ``gather_for_metrics`` keeps; 0: all."""
        return self._epoch.remainder

    def begin(self) -> None:
        """Register this epoch, after its first batch: a loader inside has registered before."""
        if not self._has_begun:
            self._has_begun = True
            self._gradients._add_dataloader(self)

    def end(self) -> None:
        """Remove this epoch."""
        self._gradients._remove_dataloader(self)


class Accelerate(Framework):
    """An ``Accelerator``, or a framework on top of it, such as the ``Trainer`` of transformers."""

    name = "Accelerate"
    where_ranks_are_known = "behind Accelerator()"

    def shards_data(self) -> bool:
        state = _state()
        return state is not None and bool(state.AcceleratorState._shared_state)

    def way_to_shard(self, loader: Any) -> str | None:
        return "stoker.echo(accelerator.prepare(loader)) gives each its part"

    def keeps_one_state(self) -> bool:
        return is_calling("accelerate.checkpointing")

    def listener(self, epoch: RunningEpoch) -> EpochListener | None:
        """Return a listener if an ``Accelerator`` was made.

        None if one of Accelerate's own loaders iterates, as it reports the end itself.
        """
        state = _state()
        if state is None or not state.GradientState._shared_state or is_calling("accelerate."):
            return None
        if epoch.ends_unequally:
            warn(
                ".shard(remainder='uneven') gives ranks last batches of unequal length, but "
                "gather() and gather_for_metrics() of Accelerate need equal ones: they fail, or "
                "add "
                "examples that do not exist. For evaluation use .shard(remainder='pad')"
            )
        return EpochListener(epoch, state.GradientState())

    def mesh(self) -> Any:
        """Return the device mesh that it has set up, or None."""
        state = _state()
        return None if state is None else state.AcceleratorState._shared_state.get("device_mesh")


def _state() -> Any:
    return sys.modules.get("accelerate.state")
