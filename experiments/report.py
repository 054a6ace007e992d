"""The arithmetic of the comparison: what each arm needed, and what it had at equal budgets.

Nothing is left out: a run that misses the target counts as a miss, and as the worst
value of its arm wherever a median is taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.arms import Arm
from experiments.runs import Budget, Evaluation, RunRecord


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
    accuracy_at_fresh: float | None
    """Median accuracy at the budget of fresh examples; None if a run ended before it."""
    accuracy_at_seconds: float
    """Median accuracy at the budget of seconds."""

    @property
    def speedup(self) -> float | None:
        """Median speed-up; None if that is a miss."""
        return (statistics.median(self.speedups) or None) if self.speedups else None


def to_target(run: RunRecord, target: float) -> Evaluation | None:
    """Return the first evaluation on the grid that reaches the accuracy `target`."""
    return next((e for e in run.evaluations if e.grid is not None and e.accuracy >= target), None)


def at_fresh(run: RunRecord, fresh: int) -> Evaluation | None:
    """Return the evaluation at the grid point `fresh`, or the last before it.

    None if the run ended before that point.
    """
    points = [e for e in run.evaluations if e.grid is not None]
    if not points or max(e.grid or 0 for e in points) < fresh:
        return None
    return [e for e in points if (e.grid or 0) <= fresh][-1]


def at_seconds(run: RunRecord, seconds: float) -> Evaluation | None:
    """Return the last evaluation at or before `seconds`."""
    return next((e for e in reversed(run.evaluations) if e.seconds <= seconds), None)


def summaries(
    runs: Sequence[RunRecord], target: float, budgets: dict[float, Budget]
) -> list[Summary]:
    """Sum up runs by arm, in order of appearance; `budgets` by the arms' R."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    plain = {(run.arm.slowness, run.seed): run for run in runs if run.arm.place == "none"}
    return [
        _summary(arm, [run for run in runs if run.arm == arm], plain, target, budgets[arm.slowness])
        for arm in arms
    ]


def _summary(
    arm: Arm,
    runs: Sequence[RunRecord],
    plain: dict[tuple[float, int], RunRecord],
    target: float,
    budget: Budget,
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
    ends = [at_fresh(run, budget.fresh) for run in runs]
    finals = [at_seconds(run, budget.seconds) for run in runs]
    return Summary(
        arm=arm,
        runs=len(runs),
        misses=sum(hit is None for hit in hits),
        fresh=_median([hit.fresh if hit else None for hit in hits]),
        steps=_median([hit.steps if hit else None for hit in hits]),
        seconds=_median([hit.seconds if hit else None for hit in hits]),
        speedups=tuple(sorted(speedups)),
        speedups_are_bounds=bounds,
        realised_factor=statistics.median(run.evaluations[-1].factor for run in runs),
        waited_fraction=statistics.median(
            run.evaluations[-1].waited_s / run.evaluations[-1].seconds for run in runs
        ),
        accuracy_at_fresh=(
            None if None in ends else statistics.median(e.accuracy for e in ends if e)
        ),
        accuracy_at_seconds=statistics.median(e.accuracy if e else 0.0 for e in finals),
    )


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, a miss being worse than any value; None if it is a miss."""
    middle = statistics.median([math.inf if value is None else value for value in values])
    return None if math.isinf(middle) else middle


def target_of(memory_runs: Sequence[RunRecord], fresh: int, share: float) -> float:
    """Choose a target: a share of the in-memory runs' median accuracy at `fresh` examples."""
    found = [at_fresh(run, fresh) for run in memory_runs]
    return share * statistics.median(e.accuracy for e in found if e)


def conclusion(found: Sequence[Summary], target: float) -> str:
    """Say in plain words what the runs showed, also where echoing did not help."""
    slow = [s for s in found if s.arm.slowness > 1]
    parts = [_gain(slow, target)]
    even = [s for s in found if s.arm.slowness <= 1 and s.arm.echoes]
    for summary in even:
        factor = _factor(summary)
        if summary.speedup is None:
            parts.append(f"With R = 1, where nothing waits, {factor} missed the target.")
        elif summary.speedup <= 1.1:
            parts.append(
                f"With R = 1, where hardly anything waits, {factor} brought nothing: "
                f"{summary.speedup:.2f} times the speed."
            )
        else:
            parts.append(
                f"With R = 1, where it should bring nothing, {factor} was {summary.speedup:.2f} "
                "times as fast: fresh data was still the slower side on this machine."
            )
    return " ".join(parts)


def _gain(found: Sequence[Summary], target: float) -> str:
    plain = next((s for s in found if s.arm.place == "none"), None)
    echoing = [s for s in found if s.arm.echoes]
    if plain is None or not echoing:
        return "There is nothing to compare."
    best = max(echoing, key=lambda s: s.speedup or 0.0)
    if best.seconds is None or best.speedup is None:
        return (
            f"No echoing arm reached {target:.1%} in most of its runs: echoing did not help here."
        )
    if best.speedup <= 1.0:
        return (
            f"Echoing did not help here: the best arm ({best.arm.label}) reached {target:.1%} at "
            f"{best.speedup:.2f} times the speed of training without it."
        )
    low, high = best.speedups[0], best.speedups[-1]
    reached = (
        f"instead of {plain.seconds:.1f} s and {plain.fresh:,.0f}"
        if plain.seconds is not None and plain.fresh is not None
        else "where training without echoing mostly missed it"
    )
    least = "at least " if best.speedups_are_bounds else ""
    text = (
        f"With storage {plain.arm.slowness:g} times slower than training, {_named(best)} "
        f"reached {target:.1%} in {best.seconds:.1f} s and {best.fresh:,.0f} fresh examples, "
        f"{reached}: {least}{best.speedup:.1f} times as fast "
        f"({low:.1f} to {high:.1f} over {best.runs} {'seed' if best.runs == 1 else 'seeds'})."
    )
    bound = next((s for s in found if s.arm.place == "memory"), None)
    if bound is not None and bound.speedup is not None:
        text += f" Training from memory, the bound, was {bound.speedup:.1f} times as fast."
    auto = next((s for s in found if s.arm.follows), None)
    if auto is not None and auto is not best and auto.speedup is not None:
        text += (
            f' With "auto" nobody chose a factor: it came to {auto.realised_factor:.1f}, and '
            f"training was {auto.speedup:.1f} times as fast."
        )
    losers = [s.arm.label for s in echoing if (s.speedup or 0.0) <= 1.0]
    if losers:
        text += f" Not faster than no echoing: {'; '.join(losers)}."
    return text


def _named(s: Summary) -> str:
    place = s.arm.place
    where = "batch echoing" if place == "batch" else f"example echoing {place} augmentation"
    return f"{where} ({_factor(s)})"


def _factor(s: Summary) -> str:
    if s.arm.follows:
        return f"auto, which came to {s.realised_factor:.1f}"
    return f"e = {s.arm.factor}"
