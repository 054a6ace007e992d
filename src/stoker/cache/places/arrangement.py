"""Chooses the places of caches from a sample: one, unless several save clearly more."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.resources import format_seconds
from stoker.cache.places.model import plan, plan_at

# The fraction of a store with several places that is spared for what is estimated wrongly. With
# none, 2 % of the recordings found no room at 1.5 times the bytes of all files
# (bench/results/tiers.json).
SPARED = 1 / 16
# A cache that chooses must promise so much less work than one that keeps what comes first, and
# several places than one. Simulated, stores of 600 photographs or recordings that filled in a
# random order left up to 7 % more work than their plan; and costs are measured of 64 examples.
_LEAST_GAIN = 1.1
# And at least this fraction of the work without a cache. Where all fits, what is left is reading
# from the store, of which a single measurement of each example says little.
_LEAST_SAVED = 0.01
# A place at which less than this fraction of the examples is kept is left out: two maps without a
# cache between them may run as one. Chosen, not measured.
_LEAST_KEPT = 0.02


class Arrangement(NamedTuple):
    """Places that keep examples, and what they promise; none if no place saves anything."""

    places: tuple[int, ...]
    by_worth: bool
    """Whether examples are chosen by what they save for their bytes, or kept as they come."""
    kept: tuple[float, ...]
    """The fraction of the examples that each of the places keeps."""
    left_ns: float
    """The time that is left, of all examples of the sample together."""


class Forecast(NamedTuple):
    """What an arrangement promises of an epoch, once the store is full."""

    kept: tuple[tuple[str, float], ...]
    """What is kept at each place, and the fraction of the examples that is."""
    work_s: float
    """Seconds of work up to the last place, without any cache."""
    predicted_s: float
    """Seconds of work up to the last place that are left."""

    def __str__(self) -> str:
        kept = ", ".join(f"{fraction:.0%} as {name}" for name, fraction in self.kept)
        left, work = map(format_seconds, (self.predicted_s, self.work_s))
        return f"{kept}; an epoch takes {left} of work up to here, not {work}"


def arrange(
    made_ns: float, saved_ns: NDArray[np.float64], sizes: NDArray[np.float64], room_bytes: float
) -> Arrangement:
    """Return the simplest arrangement that is about as good as any.

    Args:
        made_ns: the time that making all examples of the sample takes.
        saved_ns, sizes: what each example's form at each place saves, and the bytes that it takes,
            ``[n, places]``.
        room_bytes: the room for the sample.
    """

    def planned(places: list[int]) -> Arrangement:
        part = 1 - SPARED if len(places) > 1 else 1
        best = plan(saved_ns[:, places], sizes[:, places], room_bytes * part)
        return Arrangement(tuple(places), True, tuple(best.kept.tolist()), made_ns - best.saved_ns)

    count = saved_ns.shape[1]
    best = Arrangement((), False, (), made_ns)
    for place in range(count):
        found = plan_at(place, saved_ns, sizes, room_bytes)
        left_ns = made_ns - found.saved_ns
        if left_ns < best.left_ns:
            best = Arrangement((place,), False, (float(found.kept[place]),), left_ns)
    parts = np.array(planned([*range(count)]).kept)
    several = np.flatnonzero(parts >= min(_LEAST_KEPT, parts.max())).tolist()
    alone = min((planned([place]) for place in range(count)), key=lambda each: each.left_ns)
    for chosen in (alone, planned(several)):
        if chosen.left_ns * _LEAST_GAIN + _LEAST_SAVED * made_ns < best.left_ns:
            best = chosen
    return best
