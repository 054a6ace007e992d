"""The model of several places: which form of each example saves most time for its bytes.

An example has a form at each place: as it came from the source, decoded, and so on. A form that is
kept saves the time of making it, and takes its bytes. At most one form of each is kept, within a
room: a multiple-choice knapsack. Its relaxation, in which a part of one example may be kept, has a
greedy optimum (Sinha and Zoltners, 1979): of each example's forms, only those on the upper hull of
time over bytes matter; the steps along all hulls are taken by density, until the room is full. The
density of the last step is the price of a byte, and each example alone can be told where it
belongs: at the form whose saved time exceeds the price of its bytes by most.

Pure functions over a sample: times in nanoseconds and sizes in bytes, ``[n, places]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1
"""In place of a place: the example is not kept."""
# Densities that differ by less, relatively, count as equal: quotients of floats that are equal by
# algebra differ by 1e-15, and measured times by more than this.
_TIE = 1e-6


class Price(NamedTuple):
    """What a byte of the room costs."""

    per_byte: float
    """Nanoseconds; steps of a greater density fit, and those of a smaller one do not."""
    part: float
    """The fraction that fits of the steps of just this density, by their bytes."""


class HullSteps(NamedTuple):
    """Steps along the hulls of examples' forms, the densest first; each is ``[steps]``."""

    density: NDArray[np.float64]
    """Saved nanoseconds for each byte."""
    before: NDArray[np.int64]
    """The places that they leave, ``NOWHERE`` for an example's first step."""
    place: NDArray[np.int64]
    """The places that they go to."""
    size_bytes: NDArray[np.float64]
    saved_ns: NDArray[np.float64]


class BestKept(NamedTuple):
    """What is kept of a sample, in parts of an example at the end of the room."""

    kept: NDArray[np.float64]
    """The fraction of the examples that are kept at each place, ``[places]``."""
    saved_ns: float
    """The time that it saves, of all examples together."""
    size_bytes: float
    """The room that it takes, of all examples together."""


def steps_of(saved_ns: NDArray[np.float64], sizes: NDArray[np.float64]) -> HullSteps:
    """Return the steps along the hulls of all examples."""
    rows, places = np.arange(len(saved_ns)), saved_ns.shape[1]
    at = np.full(len(rows), NOWHERE, np.int64)
    time, size = np.zeros(len(rows)), np.zeros(len(rows))
    found = []
    for _ in range(places):  # an example goes to each place at most once
        gain, room = saved_ns - time[:, None], sizes - size[:, None]
        density = np.where((gain > 0) & (room >= 0), gain / np.maximum(room, 1.0), -1.0)
        place = density.argmax(axis=1)  # of equal ones, the first
        best = density[rows, place]
        goes = best >= 0
        steps = (best, at, place, room[rows, place], gain[rows, place])
        found.append([each[goes] for each in steps])
        at = np.where(goes, place, at)
        time = np.where(goes, saved_ns[rows, place], time)
        size = np.where(goes, sizes[rows, place], size)
    columns = [np.concatenate(each) for each in zip(*found, strict=True)]
    order = np.argsort(-columns[0], kind="stable")
    return HullSteps(*(column[order] for column in columns))


def price_of(saved_ns: NDArray[np.float64], sizes: NDArray[np.float64], room_bytes: float) -> Price:
    """Return the price of a byte at which what is kept fits in the room; 0.0 if everything fits."""
    density, _, _, size_bytes, _ = steps_of(saved_ns, sizes)
    fits = int(np.searchsorted(np.cumsum(size_bytes), room_bytes, side="right"))
    if fits == len(density):
        return Price(0.0, 1.0)
    denser = density > density[fits] * (1 + _TIE)
    if 0 < fits == denser.sum():  # none of its equals fits
        return Price(float(density[fits - 1]), 1.0)
    equal = ~denser & (density >= density[fits] * (1 - _TIE))
    left_bytes = room_bytes - float(size_bytes[denser].sum())
    return Price(float(density[fits]), left_bytes / float(size_bytes[equal].sum()))


def places_of(
    saved_ns: Sequence[float], sizes: Sequence[float], per_byte: float
) -> tuple[int, int]:
    """Return the place at which an example is kept for this price of a byte, or ``NOWHERE``.

    Twice: without a step of just this density, and with it. ``Price.part`` of the examples for
    which the two differ are to take it.
    """
    places = []
    for price in (per_byte * (1 + _TIE), per_byte * (1 - _TIE)):
        worth = [time - price * max(size, 1.0) for time, size in zip(saved_ns, sizes, strict=True)]
        best = max(worth, default=0.0)
        places.append(worth.index(best) if best > 0 else NOWHERE)
    return places[0], places[1]


def plan(saved_ns: NDArray[np.float64], sizes: NDArray[np.float64], room_bytes: float) -> BestKept:
    """Return what is best kept of a sample within a room."""
    examples, places = saved_ns.shape
    steps = steps_of(saved_ns, sizes)
    ends = np.cumsum(steps.size_bytes)
    # What is left of the room when each step comes, as a part of what it takes.
    left = room_bytes - (ends - steps.size_bytes)
    parts = np.clip(left / np.maximum(steps.size_bytes, 1e-9), 0.0, 1.0)
    parts[np.cumsum(parts < 1.0) > 1] = 0.0
    kept = np.bincount(steps.place, parts, places)
    again = steps.before != NOWHERE
    kept = kept - np.bincount(steps.before[again], parts[again], places)
    return BestKept(
        kept / max(1, examples),
        float(parts @ steps.saved_ns),
        float(parts @ steps.size_bytes),
    )


def plan_at(
    place: int, saved_ns: NDArray[np.float64], sizes: NDArray[np.float64], room_bytes: float
) -> BestKept:
    """Return what one place alone keeps, of whatever comes first."""
    part = min(1.0, room_bytes / max(float(sizes[:, place].sum()), 1e-9))
    kept = np.zeros(saved_ns.shape[1])
    kept[place] = part
    return BestKept(
        kept, part * float(saved_ns[:, place].sum()), part * float(sizes[:, place].sum())
    )
