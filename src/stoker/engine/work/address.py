"""The address of a segment's work in an epoch, by which its draws are keyed."""

from __future__ import annotations

from typing import NamedTuple

from stoker.schedule.progress import Pace


class WorkAddress(NamedTuple):
    """The address of a segment's work among all works of a pipeline.

    Attributes:
        at: the segment's place among the layers of the flow.
        seed, epoch: the key of its random draws.
        rank, world: this process's rank, and the number of ranks.
        batches: the number of batches of all ranks before the epoch's leg.
        paces: how examples come over the epoch; of a mixture, those of each part; empty if no map
            asks for the time.
    """

    at: int
    seed: int
    epoch: int
    rank: int = 0
    world: int = 1
    batches: int = 0
    paces: tuple[Pace, ...] = ()

    def batch_place(self, number: int) -> int:
        """Return the place of a batch by its number on this rank."""
        return self.batches + number * self.world + self.rank

    def batch_number(self, place: int) -> int:
        """Return the number of a batch on this rank by its place."""
        return (place - self.batches) // self.world
