"""The arithmetic of the comparison: what each arm needed to the target, and what may be claimed.

Nothing is left out: a run that misses the target counts as a miss, and as the worst
value of its arm wherever a median is taken.

The claim is of two arms that were named beforehand, no echoing and `FOLLOWING`: of their speed-up,
seed by seed, with the interval for its median that follows from the order of the values alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.arms import Arm
from experiments.runs import Evaluation, RunRecord

CONFIDENCE = 0.9
"""A claim needs at least so much: five seeds."""


@dataclass(frozen=True)
class Interval:
    """Where the median of what was sampled lies."""

    low: float
    high: float
    confidence: float
    """With this probability, whatever the distribution, if the samples are independent."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Interval:
        """Return the narrowest between two samples, as many from either end, of `CONFIDENCE`.

        Each sample is below the median with probability 1/2: all of n are on one side of it with
        probability 2 / 2**n. Fewer than five samples give the widest, of a lower confidence.
        """
        n, left_out, outside = len(samples), 0, 2 / 2 ** len(samples)
        while (more := outside + 2 * math.comb(n, left_out + 1) / 2**n) <= 1 - CONFIDENCE:
            left_out, outside = left_out + 1, more
        ordered = sorted(samples)
        return cls(ordered[left_out], ordered[n - 1 - left_out], 1 - outside)


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
    speedups, bounds = [], False
    for run, hit in zip(runs, hits, strict=True):
        other = plain.get((arm.slowness, run.seed))
        if other is None:
            continue
        reference = to_target(other, target)
        bounds = bounds or reference is None
        if hit is None:
            speedups.append(0.0)
        else:
            reference_s = (reference or other.evaluations[-1]).seconds
            speedups.append(reference_s / hit.seconds)
    ends = [hit or run.evaluations[-1] for run, hit in zip(runs, hits, strict=True)]
    return Summary(
        arm=arm,
        runs=len(runs),
        misses=sum(hit is None for hit in hits),
        fresh=_median([hit.fresh if hit else None for hit in hits]),
        steps=_median([hit.steps if hit else None for hit in hits]),
        seconds=_median([hit.seconds if hit else None for hit in hits]),
        speedups=tuple(sorted(speedups)),
        speedups_are_bounds=bounds,
        realised_factor=statistics.median(end.factor for end in ends),
        waited_fraction=statistics.median(end.waited_s / end.seconds for end in ends),
    )


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, a miss being worse than any value; None if it is a miss."""
    middle = statistics.median([math.inf if value is None else value for value in values])
    return None if math.isinf(middle) else middle


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
    where = f"With storage {slowness:g} times slower than training"
    if slowness == 1:
        where = "With storage as fast as training"
    if plain is None or auto is None:
        return f"{where}: the two arms of the claim did not run."
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
