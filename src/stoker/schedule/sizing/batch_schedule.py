"""Batches whose size changes while training goes on: a function of where each of them begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stoker.schedule.epoch_time import EpochTime
from stoker.schedule.sizing.cuts import PlannedCuts


@dataclass(frozen=True)
class BatchSchedule:
    """The function of ``.batch(fn)``, and its arguments.

    All ranks ask at the same places, so that they have equally many batches of equal sizes.

    Attributes:
        rows_at: how many examples the batch has that begins there, on each rank.
        drop_last: whether a last batch is left out for which there are too few.
    """

    rows_at: Callable[[EpochTime], int]
    drop_last: bool

    def cuts(self, epoch: int, rows: int, world: int, begun: int, places: int) -> PlannedCuts:
        """Return the batches of a rank in an epoch, or in its leg; raises what the function does.

        Args:
            epoch: its number.
            rows: how many examples the rank has.
            world: how many ranks have as many.
            begun: how many places of the epoch come before its leg, over all ranks.
            places: how many places it has.
        """
        sizes, row = list[int](), 0
        while row < rows:
            sizes.append(self.rows_at(EpochTime(epoch, (begun + world * row) / places)))
            row += sizes[-1]
        whole = np.array(sizes, np.int64)
        unit = int(np.gcd.reduce(whole)) if sizes else 1
        if row > rows:
            whole[-1] -= row - rows
            whole = whole[: len(whole) - self.drop_last]
        return PlannedCuts(whole, world * whole, unit)
