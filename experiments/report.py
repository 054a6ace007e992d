"""What each arm of the demonstration needed to the target, and what may be claimed.

The claim is of two arms that were named beforehand, no echoing and `FOLLOWING`: of their speed-up,
seed by seed, with the interval for its median that follows from the order of the values alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.arms import Arm
from experiments.method import CONFIDENCE, Interval, Ratios, median_or_miss, ratio_of
from experiments.runs import Evaluation, RunRecord


@dataclass(frozen=True)
class Summary:
    """One arm over all its seeds. None stands for a median that is a miss."""

    arm: Arm
    runs: int
    misses: int
    """Runs that did not reach the target."""
    fresh: float | None
    """Median fresh examples to the target."""
    steps: float | None
    """Median steps to the target."""
    seconds: float | None
    """Median seconds to the target."""
    speedups: tuple[float, ...]
    """Seconds to target without echoing over those of this arm, seed by seed, ascending; 0 for
    a miss. Where the run without echoing missed, its whole length counts: a lower bound."""
    speedups_are_bounds: bool
    """Whether a run without echoing missed the target."""
    realised_factor: float
    """Median echoing factor that was realised, over whole runs."""
    waited_fraction: float
    """Median share of the time of a run that training waited for data."""

    @property
    def speedup(self) -> float | None:
        """Median speed-up; None if that is a miss."""
        return (statistics.median(self.speedups) or None) if self.speedups else None


def to_target(run: RunRecord, target: float) -> Evaluation | None:
    """Return the first evaluation that reaches the accuracy `target`."""
    return next((e for e in run.evaluations if e.accuracy >= target), None)


def target_of(memory_runs: Sequence[RunRecord], fresh: int) -> float:
    """Choose a target: what training from memory reaches after about `fresh` examples.

    Without echoing the same examples come in the same order, so it gets there, too. The mean of
    the last three evaluations is taken, for one alone may be a lucky one. Median over the runs.
    """
    reached = []
    for run in memory_runs:
        until = [e for e in run.evaluations if e.grid <= fresh] or run.evaluations[:1]
        reached.append(statistics.fmean(e.accuracy for e in until[-3:]))
    return statistics.median(reached)


def summaries(runs: Sequence[RunRecord], target: float) -> list[Summary]:
    """Sum up runs by arm, in order of appearance."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    plain = {(run.arm.slowness, run.seed): run for run in runs if run.arm.place == "none"}
    return [_summary(arm, [run for run in runs if run.arm == arm], plain, target) for arm in arms]


def _summary(
    arm: Arm,
    runs: Sequence[RunRecord],
    plain: dict[tuple[float, int], RunRecord],
    target: float,
) -> Summary:
    hits = [to_target(run, target) for run in runs]
    pairs = [
        (to_target(other, target), other.evaluations[-1].seconds, hit)
        for run, hit in zip(runs, hits, strict=True)
        if (other := plain.get((arm.slowness, run.seed))) is not None
    ]
    speedups = Ratios.of(
        [_seconds(reference) for reference, _, _ in pairs],
        [length_s for _, length_s, _ in pairs],
        [_seconds(hit) for _, _, hit in pairs],
    )
    ends = [hit or run.evaluations[-1] for run, hit in zip(runs, hits, strict=True)]
    return Summary(
        arm=arm,
        runs=len(runs),
        misses=sum(hit is None for hit in hits),
        fresh=median_or_miss([hit.fresh if hit else None for hit in hits]),
        steps=median_or_miss([hit.steps if hit else None for hit in hits]),
        seconds=median_or_miss([hit.seconds if hit else None for hit in hits]),
        speedups=speedups.values,
        speedups_are_bounds=speedups.are_bounds,
        realised_factor=statistics.median(end.factor for end in ends),
        waited_fraction=statistics.median(end.waited_s / end.seconds for end in ends),
    )


def _seconds(hit: Evaluation | None) -> float | None:
    return hit.seconds if hit else None


def measured_ratios(found: Sequence[Summary]) -> dict[float, float]:
    """Return R by the slowness that was asked for: that of the runs without echoing."""
    return {s.arm.slowness: ratio_of(s.waited_fraction) for s in found if s.arm.place == "none"}


def conclusion(found: Sequence[Summary], target: float) -> str:
    """Say in plain words what the runs showed, also where echoing did not help."""
    slownesses = dict.fromkeys(s.arm.slowness for s in found)
    return " ".join(
        _claim([s for s in found if s.arm.slowness == slowness], target, slowness)
        for slowness in slownesses
    )


def _claim(found: Sequence[Summary], target: float, slowness: float) -> str:
    plain = next((s for s in found if s.arm.place == "none"), None)
    auto = next((s for s in found if s.arm.is_compared and s.arm.echoes), None)
    if plain is None or auto is None:
        return f"Of the storage for R = {slowness:g} the two arms of the claim did not run."
    where = (
        f"With R = {ratio_of(plain.waited_fraction):.1f} (without echoing, training waited for "
        f"{plain.waited_fraction:.0%} of the time)"
    )
    name = f'echo("auto"), which came to a factor of {auto.realised_factor:.1f},'
    if auto.seconds is None or auto.fresh is None:
        return f"{where}, {name} missed {target:.1%} in {auto.misses} of {auto.runs} runs."
    reached = (
        f"instead of {plain.seconds:.1f} s and {plain.fresh:,.0f}"
        if plain.seconds is not None and plain.fresh is not None
        else "where training without echoing mostly missed it"
    )
    text = (
        f"{where}, {name} reached {target:.1%} in {auto.seconds:.1f} s and {auto.fresh:,.0f} fresh "
        f"examples, {reached}: {_speed(auto)}."
    )
    bound = next((s for s in found if s.arm.place == "memory"), None)
    if bound is not None and bound.speedup is not None:
        text += f" Training from memory, the bound, was {bound.speedup:.1f} times as fast."
    return text


def _speed(auto: Summary) -> str:
    """Tell how many times as fast: a claim only where the interval allows one."""
    around = Interval.of(auto.speedups)
    span = f"{around.low:.2f} to {around.high:.2f}"
    if around.confidence < CONFIDENCE:
        few = "1 seed is" if auto.runs == 1 else f"{auto.runs} seeds are"
        return f"{auto.speedup:.2f} times the speed ({span}), but {few} too few for a claim"
    text = f"{span} with {around.confidence:.0%} confidence, over {auto.runs} seeds"
    if around.low > 1:
        least = "at least " if auto.speedups_are_bounds else ""
        return f"{least}{auto.speedup:.1f} times as fast ({text})"
    if around.high < 1:
        return f"slower, {auto.speedup:.2f} times the speed ({text})"
    return f"no gain is shown, for the speed-up may be 1 ({text})"
