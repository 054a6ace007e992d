"""What the rows say: arms held to training without echoing for the same time, pair by pair.

`python -m experiments.equal_time table NAME` prints the table of one question (`TABLES`).
Every arm has the rate and warm-up whose mean loss on the validation part is least, on seeds that
are used for nothing else; its test losses are those of the other seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from experiments.equal_time.plan import TUNING_SEED
from experiments.equal_time.rows import best_setting, read_rows
from experiments.method import Interval

Cells = tuple[list[str], list[list[str]]]
Row = dict[str, Any]

SAME_TIME = 0.05
"""An arm may take so much longer than training without echoing, as a share: pools that fill, and
the last steps."""
FOURTH = 3


class Chosen(NamedTuple):
    """A cell with its best settings."""

    row: Row
    losses: dict[int, float]
    """Test losses by seed."""
    metrics: dict[int, float]
    place: int
    """Of the settings."""

    @property
    def rate(self) -> str:
        """The settings, for people; in brackets where the rate is at an edge of those tried."""
        rate, warm_up = self.row["settings"][self.place]
        text = f"{rate:g}, {warm_up:.0%}"
        return f"({text})" if self.is_at_edge else text

    @property
    def is_at_edge(self) -> bool:
        """Whether a lower or higher rate than those that were tried might be better."""
        rates = [each[0] for each in self.row["settings"]]
        return rates[self.place] in (min(rates), max(rates))


class Pair(NamedTuple):
    """An arm, and training without echoing for the same time."""

    without: Chosen
    echoed: Chosen

    @property
    def differences(self) -> list[float]:
        """Loss with an echo less that without, by seed."""
        return [self.echoed.losses[seed] - self.without.losses[seed] for seed in self.echoed.losses]

    @property
    def outcome(self) -> str:
        """Whether copies helped, did harm, or neither clearly."""
        around = Interval.of(self.differences)
        return "helped" if around.high < 0 else "harm" if around.low > 0 else "level"


def chosen(row: Row) -> Chosen:
    """Return a cell with the settings that its validation part chooses."""
    tuned = [at for at, seed in enumerate(row["seeds"]) if seed >= TUNING_SEED]
    counted = [at for at, seed in enumerate(row["seeds"]) if seed < TUNING_SEED]
    best = best_setting([row["validation"][at] for at in tuned])
    return Chosen(
        row,
        {row["seeds"][at]: row["test"][at][best] for at in counted},
        {row["seeds"][at]: row["test_metric"][at][best] for at in counted},
        best,
    )


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """Return the arms that have a training without echoing to be held to.

    Raises ValueError where one took longer than that.
    """
    bases = {_stream(row): row for row in rows if row["place"] == "none"}
    found = []
    for row in rows:
        base = bases.get(_stream(row))
        if row["place"] == "none" or base is None:
            continue
        given = row["fresh_batches"] * row["ratio"]
        if max(row["waits"]) > (1 + SAME_TIME) * given + row["ratio"] * _filling(row):
            raise ValueError(f"{row['task']}, {row['arm']}: {max(row['waits'])} of {given} steps")
        found.append(Pair(chosen(base), chosen(row)))
    return found


def _filling(row: Row) -> int:
    """Batches that an arm may be late by, whatever its length: an epoch's last steps."""
    examples = row["examples"]
    return 2 if examples is None else 2 * math.ceil(row["fresh_batches"] * 32 / examples)


def _stream(row: Row) -> tuple[Any, ...]:
    return row["task"], row["examples"], row["augments"], row["fresh_batches"]


def as_long(loss: float, medians: Sequence[tuple[int, float]]) -> float | None:
    """Return how many fresh batches without echoing give a loss; None if more than were tried.

    Args:
        medians: of the losses without echoing, by fresh batches, ascending. Between two the loss
            lies on a line over the logarithm of the length.
    """
    for (short, above), (long, below) in pairwise(medians):
        if above >= loss >= below:
            share = (above - loss) / (above - below) if above > below else 0.0
            return math.exp(math.log(short) + share * math.log(long / short))
    return None


def lengths_without(pair: Pair, rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Return the medians of the losses without echoing, by length, from the pair's length on."""
    row = pair.echoed.row
    lengths = {
        other["fresh_batches"]: statistics.median(chosen(other).losses.values())
        for other in rows
        if other["place"] == "none" and _stream(other)[:3] == _stream(row)[:3]
    }
    return sorted(each for each in lengths.items() if each[0] >= row["fresh_batches"])


def times_as_long(pair: Pair, rows: Sequence[Row]) -> float | None:
    """Return how many times as long training without echoing takes to end as well.

    None if that is less than 1, or more than was tried.
    """
    found = as_long(statistics.median(pair.echoed.losses.values()), lengths_without(pair, rows))
    return None if found is None else found / pair.echoed.row["fresh_batches"]


def _as_long_text(pair: Pair, rows: Sequence[Row]) -> str:
    medians = lengths_without(pair, rows)
    if statistics.median(pair.echoed.losses.values()) > medians[0][1]:
        return "less"
    found = times_as_long(pair, rows)
    length = pair.echoed.row["fresh_batches"]
    return f"> {medians[-1][0] / length:.1f}" if found is None else f"{found:.1f}"


def line(pair: Pair, rows: Sequence[Row]) -> list[str]:
    """Return an arm's line of a table."""
    row = pair.echoed.row
    around = Interval.of(pair.differences)
    gain = statistics.median(
        pair.echoed.metrics[seed] - pair.without.metrics[seed] for seed in pair.echoed.metrics
    )
    factor = statistics.median(
        steps * _batch_size(row) / fresh
        for steps, fresh in zip(row["steps"], row["fresh"], strict=True)
    )
    return [
        task_text(row),
        f"{row['fresh_batches']:,}",
        f"{row['ratio']:g}",
        arm_text(row),
        f"{factor:.1f}",
        f"{statistics.median(pair.without.losses.values()):.3f}",
        f"{statistics.median(pair.echoed.losses.values()):.3f}",
        f"{statistics.median(pair.differences):+.3f} [{around.low:+.3f}, {around.high:+.3f}]",
        f"{gain:+.3f}",
        _as_long_text(pair, rows),
        f"{pair.without.rate} / {pair.echoed.rate}",
    ]


HEAD = [
    "task",
    "fresh batches",
    "R",
    "echo",
    "factor",
    "loss without",
    "with",
    "difference",
    "metric",
    "times as long",
    "rates, warm-ups",
]


def _batch_size(row: Row) -> int:
    return _SIZES.get(row["task"], 32)


_SIZES = {"words": 16, "views": 64}
_EXAMPLES = {"fashion": 46_000, "cifar": 48_000, "views": 48_000, "words": 31_003}
TITLES = {
    "fashion": "Fashion-MNIST",
    "cifar": "CIFAR-10",
    "views": "two views of CIFAR-10",
    "digits": "digits as a table",
    "friedman": "made-up table",
    "features": "frozen features",
    "words": "words",
}


def task_text(row: Row) -> str:
    """Name a task, its examples and passes."""
    text = TITLES[row["task"]]
    if row["examples"] is None:
        return text
    passes = row["fresh_batches"] * _batch_size(row) / row["examples"]
    bare = "" if row["augments"] or row["task"] in _BARE else ", not augmented"
    return f"{text}, {row['examples']:,} examples, {passes:.0f} passes{bare}"


_BARE = ("digits", "friedman", "features")


def arm_text(row: Row) -> str:
    """Name a way of echoing."""
    caps = ", then ".join(map(str, row["caps"]))
    place = {
        "before": "before augmentation",
        "after": "after augmentation",
        "batch": "whole batches",
        "together": "before augmentation, copies in one batch",
    }[row["place"]]
    if not row["augments"] or row["task"] in _BARE:
        place = "examples"
    return f"{place}, at most {caps}"


def _is_plain(row: Row) -> bool:
    return row["place"] == "before" and len(row["caps"]) == 1


TABLES: dict[str, Callable[[Row], bool]] = {
    "lasting": lambda row: _is_plain(row) and row["examples"] is None and row["caps"] == [4],
    "caps": lambda row: (
        _is_plain(row) and row["examples"] is None and (row["ratio"] == 8 or row["caps"] == [8])
    ),
    "passes": lambda row: row["examples"] is not None,
    "places": lambda row: (
        row["examples"] is None
        and row["fresh_batches"] == 600
        and row["ratio"] in (4, 8)
        and (row["place"] in ("after", "batch") or _is_plain(row))
    ),
    "shapes": lambda row: (
        row["examples"] is None
        and row["fresh_batches"] in (600, 1_200)
        and row["task"] in ("fashion", "cifar")
        and (
            row["place"] == "together"
            or len(row["caps"]) > 1
            or (row["place"] == "before" and (row["ratio"], row["caps"]) in ((4, [4]), (8, [8])))
        )
    ),
}
"""Which arms a table has."""


def cells(name: str, rows: Sequence[Row] | None = None) -> Cells:
    """Return a table by its name. Raises LookupError if there is none."""
    rows = read_rows() if rows is None else rows
    if name == "kinds":
        return _KINDS, list(_kinds(rows))
    if name not in TABLES:
        raise LookupError(f"there is no table {name} of trainings for equal time")
    found = [pair for pair in pairs(rows) if TABLES[name](pair.echoed.row)]
    found.sort(key=lambda pair: _order(pair.echoed.row))
    return HEAD, [line(pair, rows) for pair in found]


def _order(row: Row) -> tuple[Any, ...]:
    return (
        list(TITLES).index(row["task"]),
        row["augments"],
        row["examples"] or math.inf,
        row["fresh_batches"],
        row["ratio"],
        row["place"],
        row["caps"],
    )


def lost_by_fourth(found: Chosen) -> float | None:
    """Return the share of the fresh loss that a fourth use has lost, at its peak over training.

    The median of the seeds that count; None where there was no such use.
    """
    peaks = []
    for number, seed in enumerate(found.row["seeds"]):
        if seed >= TUNING_SEED:
            continue
        shares = [
            1 - uses[FOURTH] / uses[0]
            for uses in found.row["by_use"][number][found.place]
            if uses[0] and uses[FOURTH] is not None
        ]
        if shares:
            peaks.append(max(shares))
    return statistics.median(peaks) if peaks else None


def is_varied(row: Row) -> bool:
    """Whether something random stands behind the echo, so that uses of an example differ."""
    return row["place"] in ("before", "together") and row["augments"] and row["task"] not in _BARE


def passes_of(row: Row) -> float:
    """Return how many times a training goes over its fresh data."""
    examples = row["examples"] or _EXAMPLES[row["task"]]
    return float(row["fresh_batches"] * _batch_size(row) / examples)


def _kind(row: Row) -> str:
    """Name the kind of a training by what a loader sees of it, and by its task where that tells."""
    varied, passes = is_varied(row), passes_of(row)
    behind = "random maps behind the echo" if varied else "nothing random behind it"
    if passes < 2:
        uses = "at most 4 uses" if max(row["caps"]) <= 4 else "more uses"
        return f"{behind}, less than 2 passes, {uses}"
    if varied:
        return f"{behind}, {'4' if passes <= 4 else '16 or 64'} passes"
    return f"{behind}, 2 passes or more: {TITLES[row['task']]}"


def _kinds(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield how many trainings ended how, by their kind."""
    found: dict[str, list[str]] = {}
    every = pairs(rows)
    every.sort(key=lambda pair: (not is_varied(pair.echoed.row), passes_of(pair.echoed.row)))
    for pair in every:
        found.setdefault(_kind(pair.echoed.row), []).append(pair.outcome)
    for kind, outcomes in found.items():
        yield [kind, *(str(outcomes.count(outcome)) for outcome in ("helped", "level", "harm"))]


_KINDS = ["kind of training", "lower", "level", "higher"]


SAFE = "nothing random and two passes or more than 4 uses, or more than 4 passes"
"""The rule that catches all harm."""


def warnings() -> dict[str, Callable[[Pair], bool]]:
    """Return rules that a loader could warn by, by name."""

    def is_verbatim(pair: Pair) -> bool:
        return not is_varied(pair.echoed.row)

    def comes_round(pair: Pair) -> bool:
        return passes_of(pair.echoed.row) >= 2

    def is_often(pair: Pair) -> bool:
        row = pair.echoed.row
        if is_verbatim(pair):
            return comes_round(pair) or max(row["caps"]) > 4
        return passes_of(row) > 4

    def is_known_by_heart(pair: Pair) -> bool:
        return (lost_by_fourth(pair.echoed) or 0.0) >= 0.6

    return {
        "nothing random behind the echo": is_verbatim,
        "two passes or more": comes_round,
        "both": lambda pair: is_verbatim(pair) and comes_round(pair),
        SAFE: is_often,
        "a fourth use has lost 0.6 of the loss": is_known_by_heart,
    }
