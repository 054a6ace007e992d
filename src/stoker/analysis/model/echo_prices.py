"""The worth of echoing: time to target in the tasks of docs/evidence.md, by R.

A repeated example brings less progress than a fresh one. An analysis of a job's speed cannot know
how much less, so it quotes the results of other tasks: ``echo_prices.json`` is of the rows in
``experiments/results``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

Kind = Literal["before", "loader", "loader with a transform"]
"""An echo before augmentation, or around a loader; all with a factor that follows the stall."""


class TaskPrice(msgspec.Struct, frozen=True):
    """One task at one R."""

    kind: Kind
    workload: str
    ratio: float
    """R: how many times as long training takes as it would without waiting."""
    speedup: float | None
    """Seconds to the target without echoing, divided by those with it; 0 if it was missed.

    None if it is above ``at_most``, and so void.
    """
    is_clear: bool
    """Whether its whole interval is above 1."""
    at_most: float
    """The largest honest speed-up: the smaller of R and of how many times fewer fresh examples."""


@dataclass(frozen=True)
class EchoPrice:
    """The results of tasks with a similar R."""

    ratio: float
    """R in those tasks."""
    tasks: int
    """The number of tasks with a clear speed-up."""
    low: float
    """The smallest of these: seconds to the target without echoing, divided by those with it."""
    high: float
    """The largest."""
    unclear: int = 0
    """Tasks in which the interval of the speed-up contains 1, or is below."""


def find_price(kind: Kind, ratio: float) -> EchoPrice | None:
    """Return the results for the R nearest to a job's; None if there are none."""
    known = [price for price in _load() if price.kind == kind]
    ratios = {price.ratio for price in known if price.speedup is not None and price.is_clear}
    if not ratios:
        return None
    nearest = min(ratios, key=lambda asked: abs(asked - ratio))
    known = [price for price in known if price.ratio == nearest]
    found = [price.speedup for price in known if price.speedup is not None and price.is_clear]
    unclear = sum(not price.is_clear for price in known)
    return EchoPrice(nearest, len(found), min(found), max(found), unclear)


@cache
def _load() -> list[TaskPrice]:
    path = resources.files("stoker.analysis.model") / "echo_prices.json"
    return msgspec.json.decode(path.read_bytes(), type=list[TaskPrice])
