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
# Products and quotients of floats that are equal by algebra differ by less, relatively.
_ROUNDING = 1e-9


class HullStep(NamedTuple):
    """One step along the hull of an example's forms."""

    density: float
    """Saved nanoseconds for each byte."""
    example: int
    before: int
    """The place that it leaves, ``NOWHERE`` for the first step."""
    place: int
    """The place that it goes to."""
    size_bytes: float
    saved_ns: float


class BestKept(NamedTuple):
    """What is kept of a sample, in parts of an example at the end of the room."""

    kept: NDArray[np.float64]
    """The fraction of the examples that are kept at each place, ``[places]``."""
    saved_ns: float
    """The time that it saves, of all examples together."""
    size_bytes: float
    """The room that it takes, of all examples together."""


def steps_of(saved_ns: NDArray[np.float64], sizes: NDArray[np.float64]) -> list[HullStep]:
    """Return the steps along the hulls of all examples, the densest first."""
    steps: list[HullStep] = []
    for example, (times, room) in enumerate(zip(saved_ns.tolist(), sizes.tolist(), strict=True)):
        at, time, size = NOWHERE, 0.0, 0.0
        while True:
            # Forms in the order of places: of equal ones, the first.
            further = [
                ((t - time) / max(s - size, 1.0), place)
                for place, (t, s) in enumerate(zip(times, room, strict=True))
                if t > time and s >= size
            ]
            if not further:
                break
            density, place = max(further, key=lambda each: (each[0], -each[1]))
            step = (room[place] - size, times[place] - time)
            steps.append(HullStep(density, example, at, place, *step))
            at, time, size = place, times[place], room[place]
    steps.sort(key=lambda step: -step.density)
    return steps


def price_of(saved_ns: NDArray[np.float64], sizes: NDArray[np.float64], room_bytes: float) -> float:
    """Return the least worth of a byte, in nanoseconds, at which what is kept fits in the room.

    0.0 if everything fits; infinity if nothing does.
    """
    price = float("inf")
    for step in steps_of(saved_ns, sizes):
        room_bytes -= step.size_bytes
        if room_bytes < 0:
            return price
        price = step.density
    return 0.0


def place_of(saved_ns: Sequence[float], sizes: Sequence[float], price: float) -> int:
    """Return the place at which an example is kept for this price of a byte, or ``NOWHERE``."""
    best, best_ns, best_worth = NOWHERE, 0.0, 0.0
    for place, (time, size) in enumerate(zip(saved_ns, sizes, strict=True)):
        worth = time - price * max(size, 1.0)
        rounding = _ROUNDING * time
        if worth > best_worth + rounding or (worth >= best_worth - rounding and time > best_ns):
            best, best_ns, best_worth = place, time, worth
    return best


def plan(saved_ns: NDArray[np.float64], sizes: NDArray[np.float64], room_bytes: float) -> BestKept:
    """Return what is best kept of a sample within a room."""
    examples, places = saved_ns.shape
    kept = np.zeros(places)
    saved = used = 0.0
    for step in steps_of(saved_ns, sizes):
        part = min(1.0, max(0.0, room_bytes - used) / max(step.size_bytes, 1e-9))
        if step.before != NOWHERE:
            kept[step.before] -= part
        kept[step.place] += part
        saved += part * step.saved_ns
        used += part * step.size_bytes
        if part < 1.0:
            break
    return BestKept(kept / max(1, examples), saved, used)


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
