"""Tells Accelerate which batch is the last of an epoch, as its own loaders do.

``Accelerator.accumulate`` steps the optimizer behind every n-th batch and behind the last one.
Which that is it asks the loader that began last and has not ended.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from stoker.basics.warn import warn
from stoker.distributed.frameworks import is_calling


class Ending(Protocol):
    """An epoch that is handed out."""

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the output handed out last."""
        ...

    @property
    def remainder(self) -> int:
        """How many examples the last batches of all ranks hold; 0: there is no padding in them."""
        ...

    @property
    def ends_unequally(self) -> bool:
        """Whether ranks have more or fewer examples than others."""
        ...


class EndSignal:
    """Stands for an epoch among the loaders that Accelerate knows."""

    def __init__(self, epoch: Ending, gradients: Any) -> None:
        self._epoch = epoch
        self._gradients = gradients
        self._has_begun = False

    @staticmethod
    def of(epoch: Ending) -> EndSignal | None:
        """Return one if an ``Accelerator`` was made.

        Not where one of Accelerate's own loaders iterates: it tells the end itself.
        """
        state: Any = sys.modules.get("accelerate.state")
        if state is None or not state.GradientState._shared_state or is_calling("accelerate."):
            return None
        if epoch.ends_unequally:
            warn(
                ".shard(uneven=True) leaves ranks last batches of unequal length, and gather() and "
                "gather_for_metrics() of Accelerate want equal ones: they fail, or add examples "
                "that do not exist. For evaluation take .shard(pad=True)"
            )
        return EndSignal(epoch, state.GradientState())

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch handed out last is the last of the epoch."""
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
