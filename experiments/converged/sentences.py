"""What the rows say: where each arm ends, how much sooner, and what counts against echoing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.converged.trainings import ARMS, WHOLE, Plan, Row, Trainings
from experiments.equal_time.tables import as_long
from experiments.method import Interval


class Curve(NamedTuple):
    """An arm, by number of passes."""

    ratio: float
    """R; 0 without echoing."""
    validation: dict[int, float]
    losses: dict[int, list[float]]
    """Test losses, a seed each."""

    @property
    def converged(self) -> int:
        """The number of passes whose validation loss is least."""
        return min(self.validation, key=lambda passes: self.validation[passes])

    @property
    def last(self) -> list[float]:
        """The losses where it has converged."""
        return self.losses[self.converged]

    def passes_to(self, target: float, seed: int) -> float:
        """Return after how many passes a seed's loss is no higher than a target."""
        found = [(passes, losses[seed]) for passes, losses in self.losses.items()]
        return as_long(target, found) or float(found[0][0])


def curves(rows: Sequence[Row], plan: Plan = WHOLE) -> list[Curve]:
    """Return the arms, training without echoing first."""
    trainings = Trainings(rows, plan)
    return [
        Curve(
            arm.ratio,
            {passes: trainings.best(arm, passes)[1] for passes in lengths},
            {passes: trainings.losses(arm, passes) for passes in lengths},
        )
        for arm in ARMS
        for lengths in [trainings.lengths(arm)]
    ]


def cells(rows: Sequence[Row], plan: Plan = WHOLE) -> tuple[list[str], list[list[str]]]:
    """Return the table of losses at equal time."""
    without, *echoed = curves(rows, plan)
    lines = []
    for passes, losses in without.losses.items():
        around = Interval.of(losses)
        text = f"{statistics.median(losses):.3f} [{around.low:.3f}, {around.high:.3f}]"
        line = [str(passes), _marked(text, passes, without)]
        for curve in echoed:
            text = ""
            if passes in curve.losses:
                text = _marked(
                    _around(_less(curve.losses[passes], without.losses[passes])), passes, curve
                )
            line.append(text)
        lines.append(line)
    return ["passes", "no echo", *(f"R = {curve.ratio:g}" for curve in echoed)], lines


def _marked(text: str, passes: int, curve: Curve) -> str:
    return f"**{text}**" if passes == curve.converged else text


def _less(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    return [loss - other for loss, other in zip(losses, others, strict=True)]


def times_as_soon(without: Curve, echoed: Curve) -> list[float]:
    """Return by seed how many times as soon the worse of both converged losses is reached."""
    found = []
    for seed in range(len(without.losses[1])):
        target = max(curve.last[seed] for curve in (without, echoed))
        found.append(without.passes_to(target, seed) / echoed.passes_to(target, seed))
    return found


def said(rows: Sequence[Row], plan: Plan = WHOLE) -> list[str]:
    """Say how much sooner an echo is, and what it costs that its copies come soon."""
    without, *echoed = curves(rows, plan)
    soon = []
    for curve in echoed:
        values = times_as_soon(without, curve)
        around = Interval.of(values)
        soon.append(
            f"{statistics.median(values):.2f} [{around.low:.2f}, {around.high:.2f}] times as soon "
            f"at R = {curve.ratio:g}"
        )
    prices = []
    for curve in echoed:
        as_many_steps = round(curve.converged * curve.ratio)
        if as_many_steps in without.losses:
            price = _less(curve.last, without.losses[as_many_steps])
            prices.append(f"{_around(price)} at R = {curve.ratio:g}")
    return [
        f"**The worse of both losses in bold** is reached {'; '.join(soon)}.",
        f"**Held to as many steps with copies an epoch later**: {'; '.join(prices)}.",
    ]


def against(rows: Sequence[Row], plan: Plan = WHOLE) -> list[str]:
    """Say which of the registered points came true, and what became of the rule."""
    without, *echoed = curves(rows, plan)
    points: dict[str, list[str]] = {
        "Verbatim copies end higher": [],
        "They are no sooner": [],
        "They are higher at equal time, before the end": [],
    }
    ends, sooner, equal = points.values()
    more_passes, one_pass = list[bool](), list[bool]()
    for curve in echoed:
        at = f"R = {curve.ratio:g}"
        found = _less(curve.last, without.last)
        if Interval.of(found).low > 0:
            ends.append(f"{at}, {_around(found)}")
        if Interval.of(times_as_soon(without, curve)).low <= 1:
            sooner.append(at)
        for passes in sorted(curve.losses.keys() & without.losses.keys()):
            found = _less(curve.losses[passes], without.losses[passes])
            is_higher = Interval.of(found).low > 0
            (more_passes if passes >= 2 else one_pass).append(is_higher)
            if is_higher and passes < without.converged:
                equal.append(f"{at}, {passes} passes, {_around(found)}")
    true = [f"**{name}**: {'; '.join(cases)}." for name, cases in points.items() if cases]
    never = [name[0].lower() + name[1:] for name, cases in points.items() if not cases]
    return [
        *true,
        *([f"Registered as well, and nowhere so: {'; '.join(never)}."] if never else []),
        f"The rule above, put to the test: with two passes or more {sum(more_passes)} of "
        f"{len(more_passes)} are higher, with one pass {sum(one_pass)} of {len(one_pass)}.",
    ]


def _around(values: Sequence[float]) -> str:
    around = Interval.of(values)
    return f"{statistics.median(values):+.3f} [{around.low:+.3f}, {around.high:+.3f}]"


SAID: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "converged": said,
    "converged against": against,
}
