"""Conditions under which a job counts as worse, such as ``stall>10%`` or ``rate<0.95*base``."""

from __future__ import annotations

import re
from dataclasses import dataclass

METRICS = {
    "stall": "share of the training loop's time spent waiting for batches, start-up left out",
    "rate": "examples/s of a rank",
    "wait_p50": "median wait for a batch",
    "wait_p95": "wait for a batch that 95 % of the batches do not exceed",
    "wait_p99": "wait for a batch that 99 % of the batches do not exceed",
    "startup": "time from iter() to the first batch",
}
"""The metrics, as ``RunFigures`` has them; see there."""
FALLS = frozenset({"rate"})
"""The metrics of which less is worse."""

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_CONDITION = re.compile(
    r"(?P<metric>\w+)(?P<sign>[<>])"
    rf"(?:(?P<value>{_NUMBER})(?P<unit>%|us|ms|s|)"
    rf"|(?:(?P<factor>{_NUMBER})\*)?base(?:(?P<more>[+-]{_NUMBER})(?P<more_unit>%|us|ms|s|))?)"
)
_EXAMPLES = "stall>10%, wait_p99>50ms, or with --base: rate<0.95*base, stall>base+5%"


@dataclass(frozen=True)
class Condition:
    """One condition. The threshold is ``factor`` times the other version's value, plus ``value``.

    Attributes:
        text: as the user wrote it.
        factor: 0 for a threshold that is a number.
        value: a share, seconds, or examples/s.
    """

    text: str
    metric: str
    factor: float
    value: float

    @property
    def needs_base(self) -> bool:
        """True if it compares with another version."""
        return self.factor != 0.0


def parse_condition(text: str) -> Condition:
    """Read a condition. Raises ValueError, with an example of what to write."""
    plain = "".join(text.split())
    found = _CONDITION.fullmatch(plain)
    if found is None:
        raise ValueError(f"cannot read the condition {text!r}; for example: {_EXAMPLES}")
    metric = found["metric"]
    if metric not in METRICS:
        raise ValueError(f"{text!r}: there is no metric {metric!r}, only {', '.join(METRICS)}")
    if (found["sign"] == "<") != (metric in FALLS):
        right = "<" if metric in FALLS else ">"
        worse = "less" if metric in FALLS else "more"
        raise ValueError(f"{text!r}: {worse} is worse for {metric}: write {metric}{right}...")
    if found["value"] is not None:
        value = _read_value(text, metric, found["value"], found["unit"])
        return Condition(plain, metric, 0.0, value)
    factor = float(found["factor"] or 1.0)
    more = _read_value(text, metric, found["more"], found["more_unit"]) if found["more"] else 0.0
    if found["more"] and factor != 1.0:
        raise ValueError(f"{text!r}: write either a factor or a difference, not both")
    if found["factor"] and metric == "stall":
        # Of a job that waits 0.1 % of its time, twice as much is nothing.
        raise ValueError(f"{text!r}: compare shares by points, for example stall>base+5%")
    if factor <= 0.0:
        raise ValueError(f"{text!r}: the factor must be above 0")
    return Condition(plain, metric, factor, more)


def _read_value(text: str, metric: str, number: str, unit: str) -> float:
    """Return a number in the unit of a metric. Raises ValueError for another unit, or none."""
    if metric == "stall":
        if unit not in ("%", ""):
            raise ValueError(f"{text!r}: stall is a share: write 10% or 0.1")
        share = float(number) / (100 if unit else 1)
        if abs(share) >= 1:
            meant = f": write {number}%" if not unit else ""
            raise ValueError(f"{text!r}: a share is below 1{meant}")
        return share
    if metric == "rate":
        if unit:
            raise ValueError(f"{text!r}: rate is in examples/s, without a unit")
        return float(number)
    if unit not in _UNITS:
        raise ValueError(f"{text!r}: {metric} is a time: give a unit, such as 50ms or 0.05s")
    return float(number) * _UNITS[unit]
