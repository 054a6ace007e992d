"""What if: how fast would a job be with other hardware, a cache or an echo?

``answer`` takes one ``Change``. It returns the speed before and after, the cache and the cores with
which storage and preparation no longer limit, and a curve of the speed over each changed quantity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stoker.analysis.model.changes import KeptCache
from stoker.analysis.model.model import (
    MOST_CORES,
    NOTHING,
    Change,
    Measured,
    Prediction,
    dataset_bytes,
    find_cache_needed,
    find_cores_needed,
    predict,
)

FIELDS = {
    "cache": "cache_bytes", "cores": "cores", "storage-mbps": "storage_mbps",
    "accelerator": "accelerator", "echo": "echo",
}  # fmt: skip
"""The field of ``Change`` for each quantity, by the name of its option."""


@dataclass(frozen=True)
class Outcome:
    """The prediction for one way to run, and what it would take to be faster."""

    name: str
    prediction: Prediction
    cache_needed: float | None
    """x*: the cached fraction from which on training does not wait for storage; None: unknown."""
    cache_needed_bytes: int | None
    """The bytes of a never-evicting cache for x*; None: unknown."""
    cores_needed: int | None
    """The fewest cores with which P is no longer the limit; None: more than MOST_CORES."""


@dataclass(frozen=True)
class Point:
    """One value of the quantity, and the speed there."""

    at: float
    """In the quantity's unit; for the cache, the fraction of the dataset that it holds."""
    rate: float
    """Examples/s (uses/s under an echo)."""
    bound: str
    mark: str
    """``"as it is"``, ``"asked"`` or nothing."""


@dataclass(frozen=True)
class Curve:
    """The speed over one quantity; all else is as in the change."""

    quantity: str
    """One of FIELDS."""
    points: tuple[Point, ...]
    whole_bytes: float = 0.0
    """For the cache: the size that holds the whole dataset."""


@dataclass(frozen=True)
class Answer:
    """The answer to one question. The first outcome is the job as it is."""

    change: Change
    outcomes: tuple[Outcome, ...]
    curves: tuple[Curve, ...]


def answer(job: Measured, change: Change, kept: KeptCache | None = None) -> Answer:
    """Predict the effect of ``change``; a cache in it is of prepared examples if ``kept`` is given.

    Raises ValueError if the analysis does not allow it.
    """
    ways = {"as it is": NOTHING}
    if change != NOTHING:
        ways["then"] = change
    outcomes = tuple(_predict_outcome(job, way, name, kept) for name, way in ways.items())
    return Answer(
        change=change,
        outcomes=outcomes,
        curves=tuple(
            _make_curve(job, change, name, kept) for name in _choose_quantities(job, change)
        ),
    )


def is_asked(change: Change, quantity: str) -> bool:
    """True if ``change`` sets this quantity."""
    return bool(getattr(change, FIELDS[quantity]) != getattr(NOTHING, FIELDS[quantity]))


def _predict_outcome(job: Measured, change: Change, name: str, kept: KeptCache | None) -> Outcome:
    """Predict one way to run. Raises ValueError if the analysis cannot answer."""
    job, change = (job, change) if kept is None else kept.apply(change)
    prediction = predict(job, change)
    needed = find_cache_needed(job, change, prediction)
    size = dataset_bytes(job)
    return Outcome(
        name=name,
        prediction=prediction,
        cache_needed=needed,
        cache_needed_bytes=None if needed is None or size is None else math.ceil(needed * size),
        cores_needed=find_cores_needed(job, change, prediction),
    )


def _choose_quantities(job: Measured, change: Change) -> list[str]:
    """Name the quantities to draw: the changed ones, or all that can be answered."""
    if asked := [name for name in FIELDS if is_asked(change, name)]:
        return asked
    known = job.storage is not None and job.cache is not None
    answerable = {
        "cache": known and dataset_bytes(job) is not None,
        "cores": True,
        "storage-mbps": known and bool(job.example_bytes),
        "accelerator": True,
    }
    return [name for name, wanted in answerable.items() if wanted]


def _make_curve(job: Measured, change: Change, quantity: str, kept: KeptCache | None) -> Curve:
    """Draw one quantity. Its measured value counts as no change."""
    field = FIELDS[quantity]
    unchanged = getattr(NOTHING, field)
    asked = getattr(change, field) if is_asked(change, quantity) else None
    found: float = 1
    to_field: Callable[[float], Any] = float
    size = (dataset_bytes(job) or 0.0) if kept is None else kept.whole_bytes
    if quantity == "cache":
        found = job.cached_fraction if kept is None else 0.0
        asked = None if asked is None else min(1.0, asked / size)
        grid, to_field = [tenth / 10 for tenth in range(11)], lambda x: round(x * size)
    elif quantity == "cores":
        found, to_field = job.workers, int
        at = (job, change) if kept is None else kept.apply(change)
        needed = find_cores_needed(*at, predict(*at)) or MOST_CORES
        grid = _double(1, max(2 * needed, 2 * job.workers, change.cores or 0, 4))
    elif quantity == "storage-mbps":
        found = (job.storage or 0.0) * (job.example_bytes or 0.0) / 1e6
        grid = _double(found / 4, max(found * 32, change.storage_mbps or 0.0))
    elif quantity == "accelerator":
        # From a quarter of the accelerator's speed to four generations faster.
        grid = _double(0.25, max(16.0, change.accelerator))
    else:
        grid = _double(1.0, max(8.0, change.echo))
    points = []
    for value in sorted({*grid, found, *([] if asked is None else [asked])}):
        own = value == found and value != asked
        asks: dict[str, Any] = {field: unchanged if own else to_field(value)}
        way = replace(change, **asks)
        prediction = predict(*((job, way) if kept is None else kept.apply(way)))
        points.append(
            Point(
                at=value,
                rate=prediction.rate,
                bound=prediction.bound,
                mark="asked" if value == asked else "as it is" if value == found else "",
            )
        )
    return Curve(quantity, tuple(points), size)


def _double(start: float, end: float) -> list[float]:
    values = [start]
    while values[-1] < end:
        values.append(values[-1] * 2)
    return values
