"""The address of a segment's work in an epoch, by which its draws are keyed."""

from __future__ import annotations

from typing import NamedTuple

from stoker.schedule.epoch_time import Pace


class WorkAddress(NamedTuple):
    """What tells a work from others of its pipeline.

    Attributes:
        at: its segment's place among the parts of the plan.
        seed, epoch: what its random draws are keyed by.
        rank, world: this process among those that share an epoch.
        batches: how many batches all ranks had of the epoch before its leg.
        paces: how examples come over the epoch, of a mixture those of each part; empty where no map
            asks for the time.
    """

    at: int
    seed: int
    epoch: int
    rank: int = 0
    world: int = 1
    batches: int = 0
    paces: tuple[Pace, ...] = ()
