"""Accelerate: it shards loaders, keeps one state, and wants to know the last batch of an epoch.

``Accelerator.accumulate`` steps the optimizer behind every n-th batch and behind the last one.
Which that is it asks the loader that began last and has not ended.
"""

from __future__ import annotations

import sys
from typing import Any

from stoker.basics.warn import warn
from stoker.frameworks.framework import EpochListener, Framework, RunningEpoch, is_calling

WRITTEN_FOR = "1.15"
"""The release whose private parts are read here; tests/frameworks/test_versions.py."""


class AccelerateEpoch:
    """Stands for an epoch among the loaders that Accelerate knows."""

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
        """How many rows ``gather_for_metrics`` keeps of the last batches, gathered; 0: all."""
        return self._epoch.remainder

    def begin(self) -> None:
        """Be the one that is asked: behind the first batch, so that a loader inside came before."""
        if not self._has_begun:
            self._has_begun = True
            self._gradients._add_dataloader(self)

    def end(self) -> None:
        """Be asked no more."""
        self._gradients._remove_dataloader(self)


class Accelerate(Framework):
    """An ``Accelerator``, and what stands on it, such as the ``Trainer`` of transformers."""

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
        """Return one if an ``Accelerator`` was made.

        Not where one of Accelerate's own loaders iterates: it tells the end itself.
        """
        state = _state()
        if state is None or not state.GradientState._shared_state or is_calling("accelerate."):
            return None
        if epoch.ends_unequally:
            warn(
                ".shard(uneven=True) leaves ranks last batches of unequal length, and gather() and "
                "gather_for_metrics() of Accelerate want equal ones: they fail, or add examples "
                "that do not exist. For evaluation take .shard(pad=True)"
            )
        return AccelerateEpoch(epoch, state.GradientState())

    def mesh(self) -> Any:
        state = _state()
        return None if state is None else state.AcceleratorState._shared_state.get("device_mesh")


def _state() -> Any:
    return sys.modules.get("accelerate.state")
