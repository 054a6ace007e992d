"""Where an example stands in training, for what changes while it goes on: maps, batches, mixtures.

It follows from the example's own place, so it is the same on every rank, in every worker and after
a resume, and for each use of the example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stoker.schedule.orders.mixed import part_bits


class EpochTime(NamedTuple):
    """Where an example stands in training: what ``.map(fn, clock=True)`` tells ``fn``.

    A function in place of a batch size, or of a weight of ``mix``, is told it of the first example.
    """

    epoch: int
    """The epoch of the data, from 0."""
    progress: float
    """How much of that epoch comes before it over all ranks, from 0 to below 1."""

    @property
    def epochs(self) -> float:
        """Both together: 2.5 is the middle of epoch 2."""
        return self.epoch + self.progress


def time_at(epoch: int, place: int, places: Sequence[int]) -> EpochTime:
    """Return where a place stands; one below 0 is of an earlier epoch.

    Args:
        epoch: the epoch at hand.
        places: how many places it has, over all ranks; of a mixture, those of each part.
    """
    total = places[0]
    if len(places) > 1 and place < 0:
        total = sum(places)
    elif len(places) > 1:
        bits = part_bits(len(places))
        total, place = places[place & ((1 << bits) - 1)], place >> bits
    before, there = divmod(min(place, total - 1), total)  # what pads comes behind the last one
    return EpochTime(epoch + before, there / total)
