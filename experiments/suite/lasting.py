"""Does it last? Training with and without echoing for the same time, each with its whole schedule.

Made of the rows of Fashion-MNIST's variants of another length. At R = 4 an echo that follows the
stall takes as long as training without echoing takes for the same fresh examples: both wait for
storage. So the comparison at equal time is one at equal fresh examples, and the exact clock says
so: where it does not, there is no table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from experiments.arms import Arm
from experiments.method import Interval
from experiments.suite.plan import BASELINE
from experiments.suite.rows import RESULTS, Rows, arm_of
from experiments.suite.workload import Variant
from experiments.suite.workloads import class_of

WORKLOAD = "fashion"
LENGTHS = (150, 300, 600, 1200, 2400)
"""Fresh batches of a training; those with an echo are held to those without."""
RATIO = 4.0
_SAME_TIME = 0.02
_LAST_TESTS = 3


class Lasting(NamedTuple):
    """Trainings of one length."""

    fresh_batches: int
    without: dict[int, float]
    """Final test loss by seed."""
    echoed: dict[int, float]
    """The same with an echo; empty where that was not run."""
    seconds: tuple[float, float]
    """By the exact clock, without echoing and with it."""

    @property
    def differences(self) -> list[float]:
        """Loss with an echo less that without, by pair."""
        return [self.echoed[seed] - self.without[seed] for seed in sorted(self.echoed)]


def lengths(results: Path = RESULTS) -> list[Lasting]:
    """Return what was run, by length. Raises ValueError if a pair did not take the same time."""
    return [found for length in LENGTHS if (found := _of(length, results)) is not None]


def _of(length: int, results: Path) -> Lasting | None:
    variant = Variant(fresh_batches=length)
    recipe = class_of(WORKLOAD).recipe_of(variant, quick=False)
    rows = Rows(results / f"{WORKLOAD}.json", WORKLOAD, variant.name, recipe)
    losses: dict[Arm, dict[int, float]] = {}
    for row in rows.of_kind("training"):
        last = [point[3] for point in row["points"][-_LAST_TESTS:]]
        losses.setdefault(arm_of(row), {})[row["seed"]] = statistics.fmean(last)
    if BASELINE not in losses:
        return None
    echo = Arm("before", "auto", RATIO)
    seconds = [
        statistics.median(
            row["points"][-1][3]
            for row in rows.of_kind("timing")
            if (row["place"], row["factor"], row["ratio"]) == (arm.place, arm.factor, RATIO)
        )
        for arm in (BASELINE, *([echo] if echo in losses else []))
    ]
    if max(seconds) > (1 + _SAME_TIME) * min(seconds):
        raise ValueError(f"at {length} fresh batches the two did not take the same time")
    return Lasting(length, losses[BASELINE], losses.get(echo, {}), (seconds[0], seconds[-1]))


def as_long(loss: float, found: list[Lasting]) -> float | None:
    """Return how many fresh batches without echoing give a loss; None if more than were tried.

    Between two lengths, the loss lies on a line over the logarithm of the length.
    """
    medians = [(each.fresh_batches, statistics.median(each.without.values())) for each in found]
    for (short, above), (long, below) in pairwise(medians):
        if above >= loss >= below:
            share = (above - loss) / (above - below) if above > below else 0.0
            return math.exp(math.log(short) + share * math.log(long / short))
    return None


def cells(results: Path = RESULTS) -> tuple[list[str], list[list[str]]]:
    """Return the table; only lengths with both arms."""
    head = [
        "fresh batches",
        "seconds, without",
        "with",
        "test loss, without",
        "with `.echo()`",
        "difference",
        "as good without echoing",
    ]
    return head, list(_lines(lengths(results)))


def _lines(found: list[Lasting]) -> Iterator[list[str]]:
    for each in found:
        if not each.echoed:
            continue
        echoed = statistics.median(each.echoed.values())
        around = Interval.of(each.differences)
        needed = as_long(echoed, found)
        longest = found[-1].fresh_batches
        yield [
            f"{each.fresh_batches:,}",
            *(f"{seconds:.1f}" for seconds in each.seconds),
            f"{statistics.median(each.without.values()):.3f}",
            f"{echoed:.3f}",
            f"{statistics.median(each.differences):+.3f} [{around.low:+.3f}, {around.high:+.3f}]",
            f"{needed / each.fresh_batches:.1f} times as long"
            if needed is not None
            else f"more than {longest / each.fresh_batches:.1f} times as long",
        ]
