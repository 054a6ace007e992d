"""Where an example stands in training, for maps and mixtures that change with it.

It follows from the example's own place, so it is the same on every rank, in every worker and after
a resume, and for each use of the example.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from stoker.schedule.orders.mixed import part_bits


class Progress(NamedTuple):
    """Where an example stands in training: ``.map(fn, progress=True)`` gives it to ``fn``.

    A function in place of a weight of ``mix`` is told it of the first example.
    """

    epoch: int
    """The epoch of the data, from 0."""
    fraction: float
    """How much of that epoch comes before it over all ranks, from 0 to below 1."""

    @property
    def epochs(self) -> float:
        """Both together: 2.5 is the middle of epoch 2."""
        return self.epoch + self.fraction


class Pace(NamedTuple):
    """How the examples of a part come over an epoch: from knot to knot evenly."""

    numbers: tuple[int, ...]
    """How many of the part come before each knot; ascending from 0."""
    places: tuple[int, ...]
    """How many places of what progress counts come before it, likewise."""

    @classmethod
    def even(cls, count: int) -> Pace:
        """Return that of so many examples whose progress is their own."""
        return cls((0, count), (0, count))

    @property
    def total(self) -> int:
        """How many examples of the part an epoch has."""
        return self.numbers[-1]

    def progress(self, number: int) -> float:
        """Return how much of the epoch comes before an example of the part, by its number."""
        at = bisect.bisect_right(self.numbers, number) - 1
        within = (number - self.numbers[at]) / (self.numbers[at + 1] - self.numbers[at])
        there = self.places[at] + within * (self.places[at + 1] - self.places[at])
        return there / self.places[-1]


def progress_at(epoch: int, place: int, paces: Sequence[Pace]) -> Progress:
    """Return where a place stands; one below 0 is of an earlier epoch.

    Args:
        epoch: the epoch at hand.
        paces: how its examples come; of a mixture, those of each part.
    """
    pace = paces[0]
    if len(paces) > 1 and place < 0:
        pace = Pace.even(sum(each.total for each in paces))
    elif len(paces) > 1:
        bits = part_bits(len(paces))
        pace, place = paces[place & ((1 << bits) - 1)], place >> bits
    # What pads comes behind the last one.
    before, there = divmod(min(place, pace.total - 1), pace.total)
    return Progress(epoch + before, pace.progress(there))
