"""What the documentation says of trainings for equal time: sentences made of their rows.

Each of `SAID` returns the text of a block `<!-- said: NAME -->`: a list of bullets, or a sentence
within one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from experiments.equal_time import plan
from experiments.equal_time.rows import is_known
from experiments.equal_time.tables import (
    TABLES,
    TITLES,
    Pair,
    Row,
    arm_text,
    lengths_without,
    pairs,
    shares_lost,
    times_as_long,
)
from experiments.method import Interval


def lasting(rows: Sequence[Row]) -> list[str]:
    """Say whether echoing lasts, at each R, and how much of it is tuned."""
    found = _of("lasting", rows)
    outcomes = [pair.outcome for pair in found]
    lower = outcomes.count("helped")
    known = [
        f"{_span(_known(found, ratio, rows))} times as long at R = {ratio:g}"
        for ratio in sorted({pair.echoed.row["ratio"] for pair in found})
    ]
    unknown = sum(times_as_long(pair, rows) is None for pair in found)
    edges = [
        sum(chosen.is_at_edge for chosen in side)
        for side in ([pair.without for pair in found], [pair.echoed for pair in found])
    ]
    return [
        f"**At equal time the final loss was lower in {lower} of {len(found)} comparisons**, level "
        f"in {outcomes.count('level')}, higher in {outcomes.count('harm')}, with at most 4 uses of "
        f"an example. To end as well, training without echoing had to be {'; '.join(known)}. In "
        f"{unknown} of {len(found)} none was long enough to tell.",
        f"**By length**, {_by_length(found, rows)}",
        f"Of the {len(found)} comparisons, training without echoing has its best rate at the edge "
        f"of the grid (in brackets) in {edges[0]}, with echoing in {edges[1]}: those are not tuned "
        "in full.",
    ]


def caps(rows: Sequence[Row]) -> list[str]:
    """Say what more uses than 4 bring at R = 8."""
    return [
        f"**Caps at R = 8, before augmentation.** The loss with eight uses at most less that with "
        f"four, seed by seed: {'; '.join(_against(8, 4, rows))}.",
        f"With sixteen instead of eight: {'; '.join(_against(16, 8, rows))}.",
        f"At R = 4, with eight instead of four: {'; '.join(_against(8, 4, rows, ratio=4))}.",
    ]


def max_factor(rows: Sequence[Row]) -> str:
    """Say what a larger cap brought, for those who choose one."""
    return (
        "Trained for the same time at R = 8, with the echo before augmentation, eight uses at most "
        f"instead of four changed the final loss: {'; '.join(_against(8, 4, rows))} "
        "([evidence](evidence.md#how-many-uses))."
    )


def passes(rows: Sequence[Row]) -> list[str]:
    """Say where copies without augmentation did harm."""
    found = _bare(rows)
    parts = []
    for task in dict.fromkeys(pair.echoed.row["task"] for pair in found):
        of = [pair for pair in found if pair.echoed.row["task"] == task]
        edge = sum(pair.without.is_at_edge for pair in of)
        outcomes = [pair.outcome for pair in of]
        said = ", ".join(
            f"{text} in {outcomes.count(kind)}"
            for kind, text in (("helped", "lower"), ("level", "level"), ("harm", "higher"))
            if kind in outcomes
        )
        parts.append(
            f"{TITLES[task]}: {said} of {len(of)}, the metric by {_gains(of)} (the rate without "
            f"echoing is at the edge of the grid in {edge})"
        )
    return [
        "**Without augmentation, with data that comes round often, the task decides.** Final loss, "
        f"with echoing held to without: {'; '.join(parts)}.",
        f"**With augmentation**, little data of Fashion-MNIST (1,024 examples) gains until it has "
        f"come round often: {'; '.join(_augmented(rows))}.",
        *_like_more_passes(found, rows),
    ]


def _augmented(rows: Sequence[Row]) -> list[str]:
    """Tell the difference in loss and metric with 4 and 8 uses, by the number of passes."""
    found = [pair for pair in _of("passes", rows) if pair.echoed.row["task"] == "fashion"]
    said = []
    for pair in sorted(found, key=lambda pair: int(pair.echoed.row["fresh_batches"])):
        row = pair.echoed.row
        if row["augments"] and row["ratio"] == 8:
            around, (cap,) = Interval.of(pair.differences), row["caps"]
            said.append(
                f"{_passes(row)} passes, {cap} uses: {statistics.median(pair.differences):+.3f} "
                f"[{around.low:+.3f}, {around.high:+.3f}], accuracy {_gains([pair])}"
            )
    return said


def shapes(rows: Sequence[Row]) -> list[str]:
    """Say what copies in one batch and falling caps cost or bring."""
    apart = _losses("before", 4, [4], rows)
    constant = _losses("before", 8, [8], rows)
    falling = [
        f"{', then '.join(map(str, caps))}: {_less(_losses('before', 8, caps, rows), constant)}"
        for caps in ([8, 4, 2], [16, 8, 4])
    ]
    return [
        "**Copies of an example in one batch**, held to copies in batches apart, at "
        f"R = 4: {_less(_losses('together', 4, [4], rows), apart)}.",
        "**A cap that falls** in thirds of training, held to eight uses throughout, at R = 8: "
        f"{'; '.join(falling)}.",
    ]


def _losses(
    place: str, ratio: float, caps: list[int], rows: Sequence[Row]
) -> dict[str, dict[int, float]]:
    """Return the test losses of an arm among the shapes, by task and seed."""
    return {
        pair.echoed.row["task"]: pair.echoed.losses
        for pair in _of("shapes", rows)
        if (pair.echoed.row["place"], pair.echoed.row["ratio"]) == (place, ratio)
        and pair.echoed.row["caps"] == caps
        and pair.echoed.row["fresh_batches"] == 600
    }


def _less(arm: dict[str, dict[int, float]], other: dict[str, dict[int, float]]) -> str:
    """Tell the loss of an arm less that of another, seed by seed."""
    said = []
    for task, losses in arm.items():
        differences = [loss - other[task][seed] for seed, loss in losses.items()]
        around = Interval.of(differences)
        said.append(
            f"{TITLES[task]} {statistics.median(differences):+.3f} "
            f"[{around.low:+.3f}, {around.high:+.3f}]"
        )
    return ", ".join(said)


def copies(rows: Sequence[Row]) -> list[str]:
    """Say whether the share that a fourth use lost tells harm from the rest."""
    found = shares_lost(rows)
    harmful = [share for share, pair in found if pair.outcome == "harm"]
    rules = "; ".join(
        f"with a threshold of {limit:g}, {sum(share >= limit for share in harmful)} of "
        f"{len(harmful)} trainings with harm, and also "
        f"{sum(share >= limit and pair.outcome != 'harm' for share, pair in found)} of the "
        f"{len(found) - len(harmful)} without"
        for limit in (0.3, 0.4, 0.6)
    )
    return [
        f"**The losses of copies do not tell harm from help.** A rule that warns of shares above a "
        f"threshold finds {rules}. So there is no such rule in stoker: a validation set decides."
    ]


def missing(rows: Sequence[Row]) -> list[str]:
    """Say which cells were not run."""
    cells = plan.cells()
    absent = [cell for cell in cells if not is_known(cell, list(rows))]
    lines = []
    for task in dict.fromkeys(cell.task for cell in absent):
        kinds: dict[str, set[int]] = {}
        for cell in absent:
            if cell.task == task:
                kinds.setdefault(_kind(cell), set()).add(cell.fresh_batches)
        listed = (
            f"{kind} ({', '.join(f'{each:,}' for each in sorted(of))})"
            for kind, of in kinds.items()
        )
        lines.append(f"{TITLES[task]}: {'; '.join(listed)}")
    return [
        f"{len(cells) - len(absent)} of {len(cells)} planned cells were run; the time on the "
        f"machine was over before the others. Missing, with their fresh batches: "
        f"{'. '.join(lines)}."
    ]


def readme(rows: Sequence[Row]) -> list[str]:
    """Say in one sentence whether echoing lasts."""
    found = [pair for pair in _of("lasting", rows) if pair.echoed.row["ratio"] == 4]
    lower = sum(pair.outcome == "helped" for pair in found)
    tasks = list(dict.fromkeys(pair.echoed.row["task"] for pair in found))
    return [
        "**On storage four times slower than a training step**, and given the same training time, "
        f"the job with echoing ended with a lower loss in {lower} of {len(found)} comparisons "
        f"({_names(tasks)}). To reach that loss without echoing took "
        f"{_span(_known(found, 4, rows))} times as long, where it is known "
        "([evidence](docs/evidence.md#does-it-last))."
    ]


def _of(table: str, rows: Sequence[Row]) -> list[Pair]:
    return [pair for pair in pairs(rows) if TABLES[table](pair.echoed.row)]


def _bare(rows: Sequence[Row]) -> list[Pair]:
    return [pair for pair in _of("passes", rows) if not pair.echoed.row["augments"]]


def _known(found: Iterable[Pair], ratio: float, rows: Sequence[Row]) -> list[float]:
    at = (times_as_long(pair, rows) for pair in found if pair.echoed.row["ratio"] == ratio)
    return [each for each in at if each is not None]


def _span(values: Sequence[float]) -> str:
    low, high = (f"{edge(values):.1f}" for edge in (min, max))
    return low if low == high else f"{low} to {high}"


def _names(tasks: Sequence[str]) -> str:
    titles = [TITLES[task] for task in tasks]
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"


def _by_length(found: Sequence[Pair], rows: Sequence[Row]) -> str:
    """Tell the gain at R = 4, length by length, where it is known."""
    told: dict[str, list[str]] = {}
    for pair in sorted(found, key=lambda pair: int(pair.echoed.row["fresh_batches"])):
        row, gain = pair.echoed.row, times_as_long(pair, rows)
        if row["ratio"] == 4 and gain is not None:
            text = f"{gain:.1f} at {row['fresh_batches']:,} fresh batches"
            told.setdefault(row["task"], []).append(text)
    return (
        "at R = 4, training without echoing had to be so many times as long: "
        + "; ".join(f"{TITLES[task]} {', '.join(of)}" for task, of in told.items())
        + "."
    )


def _against(more: int, fewer: int, rows: Sequence[Row], ratio: float = 8) -> list[str]:
    """Tell the difference of two caps before augmentation, seed by seed."""
    by_cap: dict[int, dict[tuple[str, int], Pair]] = {more: {}, fewer: {}}
    for pair in [*_of("caps", rows), *_of("lasting", rows)]:
        (cap,) = pair.echoed.row["caps"]
        if cap in by_cap and pair.echoed.row["ratio"] == ratio:
            key = pair.echoed.row["task"], pair.echoed.row["fresh_batches"]
            by_cap[cap][key] = pair
    said = []
    for (task, length), pair in by_cap[more].items():
        other = by_cap[fewer].get((task, length))
        if other is None:
            continue
        losses = [loss - other.echoed.losses[seed] for seed, loss in pair.echoed.losses.items()]
        around = Interval.of(losses)
        said.append(
            f"{TITLES[task]}, {length:,} fresh batches: {statistics.median(losses):+.3f} "
            f"[{around.low:+.3f}, {around.high:+.3f}]"
        )
    return said


def _gains(found: Iterable[Pair]) -> str:
    gains = [
        statistics.median(
            pair.echoed.metrics[seed] - pair.without.metrics[seed] for seed in pair.echoed.metrics
        )
        for pair in found
    ]
    low, high = f"{min(gains):+.3f}", f"{max(gains):+.3f}"
    return low if low == high else f"{low} to {high}"


def _like_more_passes(found: Sequence[Pair], rows: Sequence[Row]) -> list[str]:
    """Hold copies that did harm to as many more passes without echoing."""
    said = []
    for pair in found:
        row = pair.echoed.row
        if pair.outcome != "harm" or (row["ratio"], row["caps"]) != (4, [4]):
            continue
        longer = dict(lengths_without(pair, rows)).get(4 * row["fresh_batches"])
        if longer is not None:
            said.append(
                f"On {row['examples']:,} examples of {TITLES[row['task']]}, {_passes(row)} passes "
                f"with 4 uses end at "
                f"{_median(pair.echoed.losses):.3f}, and {4 * _passes(row)} passes without "
                f"echoing, which are about as many steps, at {longer:.3f}."
            )
    return said


def _passes(row: Row) -> int:
    return int(row["fresh_batches"] * 32 // row["examples"])


def _median(losses: dict[int, float]) -> float:
    return statistics.median(losses.values())


def _kind(cell: plan.Cell) -> str:
    if cell.examples is not None:
        bare = "" if cell.augments else ", not augmented"
        return f"{cell.examples:,} examples{bare}"
    if not cell.arm.caps:
        return "without echoing"
    return arm_text(
        {
            "task": cell.task,
            "augments": cell.augments,
            "place": cell.arm.place,
            "caps": cell.arm.caps,
        }
    )


SAID: dict[str, Callable[[Sequence[Row]], list[str] | str]] = {
    "readme": readme,
    "lasting": lasting,
    "caps": caps,
    "max factor": max_factor,
    "passes": passes,
    "shapes": shapes,
    "copies": copies,
    "missing": missing,
}
