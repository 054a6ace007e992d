"""What the rows of a workload say: each arm held to training without echoing, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.arms import PLACES, Arm
from experiments.method import (
    Interval,
    Ratios,
    crossing,
    median_or_miss,
    smoothed,
    value_at,
)
from experiments.suite.plan import BASELINE, timing_of
from experiments.suite.rows import Rows, Run, arm_of

TARGET_SHARE = 0.6
"""The target is the loss of training without echoing after so much of its budget."""


# Seconds are rounded to microseconds in rows.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Differences:
    """An arm's values less those of training without echoing, seed by seed."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def interval(self) -> Interval:
        """Where the median lies."""
        return Interval.of(self.values)


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its seeds."""

    arm: Arm
    learning_rate: float
    warm_up: float | None
    """Share of the training; None in rows from before it was tuned."""
    seeds: int
    misses: int
    """Runs that did not reach the target."""
    fresh_ratios: Ratios
    """Fresh examples to the target without echoing over those with: rho."""
    speedups: dict[float, Ratios]
    """Seconds to the target without echoing over those with, by the R that was asked for."""
    steps: float | None
    """Median steps to the target; None if that is a miss."""
    losses: Differences
    """Test loss at the end, which is after equally many fresh examples."""
    metric: float
    """Median of the workload's metric at the end."""
    factor: float
    """Median of the echoing factor that was realised."""
    copy_distance: float
    """Median steps between two uses of an item; 0 without echoing."""
    curve: tuple[tuple[float, ...], tuple[float, ...]]
    """Fresh examples, and the median over the seeds of the smoothed test loss."""


@dataclass(frozen=True)
class Comparison:
    """All arms of a workload that have rows."""

    target: float
    seeds: int
    ratios: tuple[float, ...]
    """R of the exact clock, ascending."""
    arms: tuple[ArmSummary, ...]

    def bound(self, each: ArmSummary, ratio: float) -> float:
        """Return what no honest speed-up is above: rho, and R.

        Rho, where it is above 1: an arm needs so many times fewer fresh examples, and none comes
        sooner. R: training without echoing would be so many times faster if it never waited.
        """
        return min(max(1.0, each.fresh_ratios.median or 0.0), ratio)

    def is_void(self, each: ArmSummary, ratio: float) -> bool:
        """Whether a speed-up is above that.

        Above rho it cannot be by the exact clock. Above R it is where an arm needs fewer steps than
        training without echoing, whose settings are then not its best. Such a cell is shown with a
        flag, and enters no summary, price or sentence.
        """
        found = each.speedups[ratio].median if each.arm.echoes else None
        return found is not None and found > self.bound(each, ratio) + _ROUNDING


def compared(rows: Rows) -> Comparison | None:
    """Compare what is in the rows; None where training without echoing is not."""
    runs: dict[Arm, dict[int, dict[str, Any]]] = {}
    for row in rows.of_kind("training"):
        runs.setdefault(arm_of(row), {})[row["seed"]] = row
    if BASELINE not in runs:
        return None
    plain = runs[BASELINE]
    target = statistics.median(
        value_at(TARGET_SHARE * _fresh(row)[-1], _fresh(row), _losses(row))
        for row in plain.values()
    )
    ratios = sorted({row["ratio"] for row in rows.of_kind("timing") if row["place"] == "none"})
    arms = sorted(
        runs,
        key=lambda a: (
            PLACES.index(a.place),
            a.transform,
            a.follows,
            str(a.factor).zfill(3),
            a.slowness,
        ),
    )
    return Comparison(
        target,
        len(plain),
        tuple(ratios),
        tuple(_summary(rows, arm, runs[arm], plain, target, ratios) for arm in arms),
    )


def _summary(
    rows: Rows,
    arm: Arm,
    runs: dict[int, dict[str, Any]],
    plain: dict[int, dict[str, Any]],
    target: float,
    ratios: Sequence[float],
) -> ArmSummary:
    seeds = sorted(runs.keys() & plain.keys())
    mine, theirs = [runs[seed] for seed in seeds], [plain[seed] for seed in seeds]
    hits = [crossing(_fresh(row), _losses(row), target) for row in mine]
    base_hits = [crossing(_fresh(row), _losses(row), target) for row in theirs]
    speedups = {}
    for ratio in [arm.slowness] if arm.follows else ratios:
        timings = [_timing(rows, row, arm, ratio) for row in mine]
        base_timings = [_timing(rows, row, BASELINE, ratio) for row in theirs]
        if None in timings or None in base_timings:
            continue
        speedups[ratio] = Ratios.of(
            [_seconds(*each) for each in zip(base_hits, theirs, base_timings, strict=True)],
            [timing["points"][-1][3] for timing in base_timings if timing],
            [_seconds(*each) for each in zip(hits, mine, timings, strict=True)],
        )
    timed = [
        row
        for row in rows.of_kind("timing")
        if arm_of(row) == (arm if arm.follows else replace(arm, slowness=row["ratio"]))
    ]
    last = [row["points"][-1] for row in mine]
    return ArmSummary(
        arm=arm,
        learning_rate=mine[0]["learning_rate"],
        warm_up=mine[0].get("warm_up"),
        seeds=len(seeds),
        misses=sum(hit is None for hit in hits),
        fresh_ratios=Ratios.of(base_hits, [_fresh(row)[-1] for row in theirs], hits),
        speedups=speedups,
        steps=median_or_miss(
            [
                hit and value_at(hit, _fresh(row), [point[0] for point in row["points"]])
                for hit, row in zip(hits, mine, strict=True)
            ]
        ),
        losses=Differences(
            tuple(
                sorted(_losses(a)[-1] - _losses(b)[-1] for a, b in zip(mine, theirs, strict=True))
            )
        ),
        metric=statistics.median(point[4] for point in last),
        factor=statistics.median(uses / fresh for _, fresh, uses, *_ in last),
        copy_distance=statistics.median(row["copy_distance"] for row in timed) if timed else 0.0,
        curve=_curve(mine),
    )


def _timing(rows: Rows, row: dict[str, Any], arm: Arm, ratio: float) -> dict[str, Any] | None:
    return rows.find(timing_of(Run("training", arm, row["seed"]), ratio))


def _seconds(hit: float | None, row: dict[str, Any], timing: dict[str, Any] | None) -> float | None:
    """Return when a training that reached the target after `hit` fresh examples did so."""
    if hit is None or timing is None:
        return None
    # Between the same points as the loss: so no interpolation comes to a fresh example too soon.
    if timing["digest"] != row["digest"]:
        raise ValueError(f"the clock of seed {row['seed']} is that of another run")
    return value_at(hit, _fresh(row), [point[3] for point in timing["points"]])


def _fresh(row: dict[str, Any]) -> list[float]:
    return [point[1] for point in row["points"]]


def _losses(row: dict[str, Any]) -> list[float]:
    """Return the smoothed test loss."""
    return smoothed([point[3] for point in row["points"]])


def _curve(runs: Sequence[dict[str, Any]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    at = _fresh(runs[0])
    medians = [
        statistics.median(value_at(place, _fresh(row), _losses(row)) for row in runs)
        for place in at
    ]
    return tuple(at), tuple(medians)
