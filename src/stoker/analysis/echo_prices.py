"""What echoing was worth: time to target on the tasks of docs/evidence.md, by R.

A repeat is a step, but less progress than a fresh example. How much less no analysis of a job's
speed can tell, so what is told is where other tasks came out. ``echo_prices.json`` is made of the
rows of the experiments (``experiments/run evidence``).
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
    """R: how many times as long training takes as it would if it never waited."""
    speedup: float
    """Seconds to the target without echoing over those with it; 0: the target was missed."""


@dataclass(frozen=True)
class EchoPrice:
    """Where the tasks came out, whose storage was about as slow."""

    ratio: float
    """R in those tasks."""
    tasks: int
    low: float
    """Seconds to the target without echoing over those with it, in the worst of the tasks."""
    high: float


def find_price(kind: Kind, ratio: float) -> EchoPrice | None:
    """Return what was measured at the R nearest to a job's; None if nothing was."""
    known = [price for price in _load() if price.kind == kind]
    if not known:
        return None
    nearest = min({price.ratio for price in known}, key=lambda asked: abs(asked - ratio))
    found = [price.speedup for price in known if price.ratio == nearest]
    return EchoPrice(nearest, len(found), min(found), max(found))


@cache
def _load() -> list[TaskPrice]:
    path = resources.files("stoker.analysis") / "echo_prices.json"
    return msgspec.json.decode(path.read_bytes(), type=list[TaskPrice])
