"""What the rows say: damage and worth of repeats, as tables, a figure and sentences."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from experiments.method import Interval
from experiments.repeats import language
from experiments.repeats.orders import BLOCKS, FRESH, POOLS, SUBSET, Arm

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINEAR = RESULTS / "repeats_linear.jsonl"
LANGUAGE = RESULTS / "repeats_language.jsonl"

MARGIN = 0.05
"""What counts as a difference between two distances."""
TITLES = {
    "misspecified": "linear model, misspecified",
    "with noise": "linear model, with noise",
    "words": "language model, words",
}

Row = dict[str, Any]


class Around(NamedTuple):
    """A median of five seeds, and its interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Around:
        """Return that of some values."""
        around = Interval.of(values)
        return cls(statistics.median(values), around.low, around.high)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Cost(NamedTuple):
    """What one way of repeating costs."""

    model: str
    arm: Arm
    is_at_edge: bool
    """Whether a lower or higher rate than those that were tried might be better."""
    damage: Around
    """The share of the compute that was in vain."""
    most: float
    """The largest share that can be told: all that is worse than the shortest fresh training."""

    @property
    def worth(self) -> Around:
        """How many times as much fresh data ends as well without repeats, if all is repeated."""
        low, median, high = (
            self.arm.uses * (1 - each)
            for each in (self.damage.high, self.damage.median, self.damage.low)
        )
        return Around(median, low, high)


def read_rows() -> list[Row]:
    """Return the rows of both models; those of the language model whose seeds are all there."""
    lines = LINEAR.read_text(encoding="utf-8").splitlines() if LINEAR.exists() else []
    return [*map(json.loads, lines), *language.rows(language.read(LANGUAGE))]


def costs(rows: Sequence[Row]) -> list[Cost]:
    """Hold every arm to fresh data, as registered."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = [row for row in rows if row["model"] == model]
        fresh = {row["steps"]: row["losses"] for row in of if row["distance"] == FRESH}
        longest = max(fresh)
        medians = sorted((n, statistics.median(losses)) for n, losses in fresh.items())
        for row in of:
            if row["distance"] == FRESH:
                continue
            pairs = zip(row["losses"], fresh[longest], strict=True)
            paired = [loss / other * medians[-1][1] for loss, other in pairs]
            damages = [1 - steps_for(loss, medians) / longest for loss in paired]
            arm = Arm(row["distance"], row["uses"], row["steps"])
            most = 1 - medians[0][0] / longest
            found.append(Cost(model, arm, row["is_at_edge"], Around.of(damages), most))
    return found


def steps_for(loss: float, medians: Sequence[tuple[int, float]]) -> float:
    """Return how many steps on fresh data end with a loss.

    Beyond the longest training the line goes on. What is worse than the shortest counts as it.

    Args:
        medians: of the losses by steps, ascending.
    """
    for (short, above), (long, below) in reversed(list(pairwise(medians))):
        if loss <= above:
            share = math.log(above / loss) / math.log(above / below)
            return float(short * (long / short) ** share)
    return float(medians[0][0])


def cost_of(found: Sequence[Cost], model: str, distance: str, uses: int) -> Cost | None:
    """Return the cost of an arm; None if it was not run."""
    return next((c for c in found if (c.model, *c.arm[:2]) == (model, distance, uses)), None)


def worst_subset(found: Sequence[Cost], model: str) -> Cost | None:
    """Return the number of uses of a subset that costs most."""
    of = [c for c in found if c.model == model and c.arm.distance == SUBSET]
    return max(of, key=lambda c: c.damage.median, default=None)


def cells() -> tuple[list[str], list[list[str]]]:
    """Return the table of damages: a line for each model and number of uses."""
    found = costs(read_rows())
    distances = [*(name for name in (*BLOCKS, *POOLS) if name != "evenly"), SUBSET]
    distances.sort(key=_ORDER.index)
    lines = []
    for model in dict.fromkeys(cost.model for cost in found):
        for uses in (2, 8, 32):
            of = [cost_of(found, model, name, uses) for name in distances]
            if any(of):
                texts = ["" if cost is None else _marked(cost) for cost in of]
                lines.append([TITLES[model], str(uses), *texts])
    return ["model", "uses", *distances], lines


_ORDER = ["next step", "8 steps", "pool of 16", "pool of 64", "an epoch", SUBSET]


def _marked(cost: Cost) -> str:
    text = str(cost.damage) if cost.damage.median < cost.most else f"> {cost.most:.2f}"
    return f"({text})" if cost.is_at_edge else text


def against(found: Sequence[Cost]) -> list[str]:
    """Say which of the registered points came true, and where; then those that did not."""

    def is_worse(one: Cost, other: Cost) -> bool:
        gap = one.damage.median - other.damage.median
        return gap > MARGIN and one.damage.low > other.damage.high

    points = {
        "Copies soon cost more than copies an epoch later (a pool of 16, an epoch)": _cases(
            found, is_worse, "pool of 16", "an epoch"
        ),
        "Copies through a pool of 16 may be worth nothing": _cases(
            found, lambda a, _: a.worth.low <= 1, "pool of 16", "pool of 16"
        ),
        "Twice as many uses are worth less, so that the caps are too high": _cases(
            found, lambda a, b: a.worth.high < b.worth.low, "pool of 16", "pool of 16", fewer=2
        ),
        "A pool of 16 costs more than one of 64": _cases(
            found, is_worse, "pool of 16", "pool of 64"
        ),
        "8 steps cost more than a pool of 16": _cases(found, is_worse, "8 steps", "pool of 16"),
        "8 steps cost no less than the next step": _cases(
            found, lambda a, b: a.damage.high >= b.damage.low, "8 steps", "next step"
        ),
    }
    said = [f"**{name}**: {'; '.join(cases)}." for name, cases in points.items() if cases]
    never = [name[0].lower() + name[1:] for name, cases in points.items() if not cases]
    lost = [
        f"{TITLES[c.model]}, {c.arm.distance}, {c.arm.uses} uses{', an edge' * c.is_at_edge}"
        for c in found
        if c.arm.distance not in (SUBSET, "evenly") and c.worth.high < 1
    ]
    if lost:
        said.append(f"**Worth less than no repeats at all**: {'; '.join(lost)}.")
    tenth = []
    for model in TITLES:
        one, worst = cost_of(found, model, "evenly", 2), worst_subset(found, model)
        if one is not None and worst is not None:
            sign = "less than" if one.damage.high < worst.damage.low else "no less than"
            tenth.append(f"{TITLES[model]} {one.damage}, {sign} {worst.damage}")
    return [
        *said,
        "**A tenth of the compute on copies**, spread evenly and soon, held to the worst number of "
        f"uses of a subset: {'; '.join(tenth)}. Copies that were not made would cost 0.10.",
        f"Registered as well, and nowhere so: {'; '.join(never)}.",
    ]


def _cases(
    found: Sequence[Cost],
    is_so: Callable[[Cost, Cost], bool],
    first: str,
    second: str,
    fewer: int = 1,
) -> list[str]:
    """Return by model where a distance and another one, with so many times fewer uses, are so."""
    said = []
    for model, title in TITLES.items():
        of = []
        for uses in (2, 4, 8):
            one = cost_of(found, model, first, uses)
            other = cost_of(found, model, second, uses // fewer)
            if one is not None and other is not None and is_so(one, other):
                values = f"worth {one.worth}"
                if first != second:
                    values = f"{one.damage.median:.2f} and {other.damage.median:.2f}"
                of.append(f"{uses} uses {values}")
        if of:
            said.append(f"{title}, {', '.join(of)}")
    return said


def repeats(found: Sequence[Cost]) -> list[str]:
    """Say what repeats cost, by number and by distance."""
    worth, subset = [], []
    for model, title in TITLES.items():
        for distance in ("pool of 16", "an epoch"):
            cost = cost_of(found, model, distance, 8)
            if cost is not None:
                worth.append(f"{title}, {distance} {cost.worth}")
        worst = worst_subset(found, model)
        counts = sorted(c.arm.uses for c in found if c.model == model and c.arm.distance == SUBSET)
        if worst is not None and counts[0] < worst.arm.uses < counts[-1]:
            subset.append(f"{title} {worst.damage} at {worst.arm.uses:,} of up to {counts[-1]:,}")
    return [
        "**What data is worth with 8 uses**, as multiples of the same data without repeats: "
        f"{'; '.join(worth)}.",
        f"**A subset hurts most at an intermediate count** (in vain, uses): {'; '.join(subset)}.",
    ]


def missing(found: Sequence[Cost]) -> list[str]:
    """Say which arms of the language model were not run."""
    wanted = [arm for arm in language.arms() if arm.distance != FRESH]
    known = {cost.arm for cost in found if cost.model == language.MODEL}
    absent = [arm for arm in wanted if arm not in known]
    said = "; ".join(
        f"{uses} uses ({', '.join(arm.distance for arm in absent if arm.uses == uses)})"
        for uses in sorted({arm.uses for arm in absent})
    )
    not_yet = f"Not yet: {said}." if said else "None is missing."
    return [
        f"{len(wanted) - len(absent)} of {len(wanted)} registered arms of the language model have "
        f"run, on one of two busy processor cores. {not_yet}"
    ]


SAID: dict[str, Callable[[Sequence[Cost]], list[str]]] = {
    "against": against,
    "repeats": repeats,
    "missing": missing,
}
