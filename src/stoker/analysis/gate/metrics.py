"""The metrics of a run of a script, and conditions on them, such as ``stall>10%``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stoker.analysis.model import rates
from stoker.analysis.model.trace import RankTrace
from stoker.analysis.probe import records

# Fewer say nothing about a share of time. Chosen, not measured.
FEWEST_BATCHES = 10
"""Batches in steady state that a run must have."""


class RunFigures(msgspec.Struct, frozen=True):
    """One run. Of several ranks, the one that is worst by each figure."""

    stall: float
    """Share of the steady state spent inside ``next()``: prep and fetch stall together, as an upper
    bound where the accelerator works on meanwhile."""
    rate: float
    """Examples/s in steady state; batches/s where neither the loader nor its batch sampler has a
    batch size."""
    wait_p50: float
    """Percentiles of the waits for a batch, in seconds, the first of each epoch left out."""
    wait_p95: float
    wait_p99: float
    startup: float
    """Seconds from ``iter()`` to the first batch; of several epochs, the median from the second
    on."""
    batches: int
    """Batches of a rank; the fewest."""


def measure_run(ranks: Sequence[RankTrace]) -> RunFigures:
    """Return the figures of the ranks of a job. Raises ValueError if they have too few batches."""
    each = [_measure_rank(rank) for rank in ranks]
    worst = {
        name: (min if name in (*FALLS, "batches") else max)(getattr(one, name) for one in each)
        for name in RunFigures.__struct_fields__
    }
    return RunFigures(**worst)


def _measure_rank(rank: RankTrace) -> RunFigures:
    seen, _ = rates.estimate_steady(rank, rates.estimate_batch_size(rank))
    waits_s = list_waits_s(rank)
    if seen is None or len(waits_s) < FEWEST_BATCHES:
        raise ValueError(
            f"only {len(waits_s)} batches came after the first ones of each epoch: at least "
            f"{FEWEST_BATCHES} are needed; let the script train longer, or give a larger --seconds"
        )
    cuts = statistics.quantiles(waits_s, n=100, method="inclusive")
    return RunFigures(
        stall=seen.wait_fraction,
        rate=seen.rate.value,
        wait_p50=cuts[49],
        wait_p95=cuts[94],
        wait_p99=cuts[98],
        startup=rates.estimate_startup_s(rank),
        batches=len(waits_s),
    )


def list_waits_s(rank: RankTrace) -> list[float]:
    """Return the waits for batches of the training loader, the first of each epoch left out."""
    waits, started = [], set()
    for row in rank.rows:
        if row.slot != rank.slot or row.event != records.BATCH:
            continue
        if row.epoch in started:
            waits.append((row.left_ns - row.entered_ns) / 1e9)
        started.add(row.epoch)
    return waits


METRICS = ("stall", "rate", "wait_p50", "wait_p95", "wait_p99", "startup")
"""The metrics, as ``RunFigures`` has them."""
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
