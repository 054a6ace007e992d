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
    speedup: float | None
    """Seconds to the target without echoing over those with it; 0: the target was missed.

    None: what was measured is above ``at_most``, and so no speed-up.
    """
    at_most: float
    """What none can be above, where storage has one constant speed: rho, and R as measured."""


@dataclass(frozen=True)
class EchoPrice:
    """Where the tasks came out, whose storage was about as slow."""

    ratio: float
    """R in those tasks."""
    tasks: int
    """Those of which that is known."""
    low: float
    """Seconds to the target without echoing over those with it, in the worst of the tasks."""
    high: float
    others: int = 0
    """Tasks whose measurement is void: there it is known only what the speed-up is at most."""
    others_at_most: float = 0.0
    """The largest of these bounds."""


def find_price(kind: Kind, ratio: float) -> EchoPrice | None:
    """Return what was measured at the R nearest to a job's; None if nothing was."""
    known = [price for price in _load() if price.kind == kind]
    ratios = {price.ratio for price in known if price.speedup is not None}
    if not ratios:
        return None
    nearest = min(ratios, key=lambda asked: abs(asked - ratio))
    known = [price for price in known if price.ratio == nearest]
    found = [price.speedup for price in known if price.speedup is not None]
    void = [price.at_most for price in known if price.speedup is None]
    return EchoPrice(nearest, len(found), min(found), max(found), len(void), max(void, default=0.0))


@cache
def _load() -> list[TaskPrice]:
    path = resources.files("stoker.analysis.model") / "echo_prices.json"
    return msgspec.json.decode(path.read_bytes(), type=list[TaskPrice])
