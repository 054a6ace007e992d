"""What the documentation says of trainings for equal time: sentences made of their rows.

Each of `SAID` returns the text of a block `<!-- said: NAME -->`: a list of bullets, or a sentence
within one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from experiments.equal_time.tables import (
    SAFE,
    TABLES,
    TITLES,
    Pair,
    Row,
    lengths_without,
    pairs,
    passes_of,
    times_as_long,
    warnings,
)
from experiments.method import Interval


def lasting(rows: Sequence[Row]) -> list[str]:
    """Say whether echoing lasts, at each R, and how much of it is tuned."""
    found = _of("lasting", rows)
    known = [
        f"{_span(_known(found, ratio, rows))} times as long at R = {ratio:g}"
        for ratio in sorted({pair.echoed.row["ratio"] for pair in found})
    ]
    unknown = sum(times_as_long(pair, rows) is None for pair in found)
    without, echoed = (
        sum(chosen.is_at_edge for chosen in side)
        for side in ([pair.without for pair in found], [pair.echoed for pair in found])
    )
    tasks = list(dict.fromkeys(pair.echoed.row["task"] for pair in found))
    return [
        f"**At equal time the final loss was {_outcomes(found)} comparisons** ({_names(tasks)}), "
        f"with at most 4 uses of an example. To end as well, training without echoing had to be "
        f"{'; '.join(known)}. In {unknown} of {len(found)} none was long enough to tell.",
        f"Of the {len(found)}, training without echoing has its best rate at the edge of the grid "
        f"in {without}, with echoing in {echoed}: those are not tuned in full.",
    ]


def caps(rows: Sequence[Row]) -> list[str]:
    """Say what more uses than 4 bring at R = 8."""
    return [
        f"**At R = 8, before augmentation**, eight uses at most instead of four: "
        f"{_changes(_against(8, 4, rows))}. Sixteen instead of eight: "
        f"{_changes(_against(16, 8, rows))}.",
        f"At R = 4, eight instead of four: {_changes(_against(8, 4, rows, ratio=4))}.",
    ]


def max_factor(rows: Sequence[Row]) -> str:
    """Say what a larger cap brought, for those who choose one."""
    return (
        "Trained for the same time at R = 8, with the echo before augmentation, eight uses at most "
        f"instead of four changed the final loss: {_changes(_against(8, 4, rows))} "
        "([evidence](evidence.md#how-many-uses))."
    )


def places(rows: Sequence[Row]) -> list[str]:
    """Say what the place of the echo, copies in one batch and falling caps cost or bring."""
    names = {"before": "before augmentation", "after": "after it", "batch": "of whole batches"}
    lines = []
    for task in ("fashion", "cifar"):
        parts = []
        for place, name in names.items():
            for pair in _of("places", rows):
                row = pair.echoed.row
                if (row["task"], row["place"], row["ratio"], row["caps"]) == (task, place, 4, [4]):
                    parts.append(f"{name} {_around(pair.differences)}")
        lines.append(f"{TITLES[task]}, the loss less that without: {', '.join(parts)}")
    eight = [
        pair
        for pair in _of("places", rows)
        if pair.echoed.row["place"] in ("after", "batch") and pair.echoed.row["caps"] == [8]
    ]
    apart = _losses("before", 4, [4], rows)
    constant = _losses("before", 8, [8], rows)
    return [
        f"**At R = 4, with 600 fresh batches.** {'. '.join(lines)}.",
        f"Eight uses after augmentation or of whole batches: the loss was {_outcomes(eight)}.",
        "**Copies of an example in one batch** end with a higher loss than copies apart, at R = 4: "
        f"{_less(_losses('together', 4, [4], rows), apart)}. So copies stay apart.",
        "**A cap that falls** in thirds of training, 8, then 4, then 2, held to eight throughout, "
        f"at R = 8: {_less(_losses('before', 8, [8, 4, 2], rows), constant)}. So it stays.",
    ]


def passes(rows: Sequence[Row]) -> list[str]:
    """Say where copies without augmentation did harm, and whether that can be foreseen."""
    found = _bare(rows)
    return [
        f"**Where the loss rose**, fourfold passes without echoing raised it as well: "
        f"{'; '.join(_like_more_passes(found, rows))}. The metric changed by "
        f"{_gains(pair for pair in found if pair.outcome == 'harm')}: the network is too sure of "
        "itself.",
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
    return ", ".join(
        f"{TITLES[task]} {_around([loss - other[task][seed] for seed, loss in losses.items()])}"
        for task, losses in arm.items()
    )


def rules(rows: Sequence[Row]) -> list[str]:
    """Say whether anything that a loader sees tells harm from the rest."""
    found = pairs(rows)
    harm = [pair for pair in found if pair.outcome == "harm"]
    said = []
    for name, warns in warnings().items():
        caught = sum(warns(pair) for pair in harm)
        vain = sum(warns(pair) for pair in found) - caught
        wrong = (len(harm) - caught + vain) / len(found)
        said.append(f"{name}: {caught} of {len(harm)}, {vain} in vain, wrong in {wrong:.0%}")
    silent = [pair for pair in found if not warnings()[SAFE](pair)]
    return [
        f"**No rule separates harm from help.** Of {len(found)} trainings {len(harm)} ended with a "
        f"higher loss, so that never to warn is wrong in {len(harm) / len(found):.0%}. Rules, what "
        f"they catch and how often they warn in vain: {'; '.join(said)}. So stoker neither warns "
        "nor holds back: a table by kind of training is in place of a rule, and a validation set "
        "decides.",
        "**What is safe can be said**: up to four passes with random maps behind the echo, or less "
        "than two passes with nothing random behind it and at most 4 uses. There the loss was "
        f"{_outcomes(silent)}. (A rule that was found on these trainings.)",
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


def _against(more: int, fewer: int, rows: Sequence[Row], ratio: float = 8) -> list[list[float]]:
    """Return the differences of two caps before augmentation, seed by seed, by task and length."""
    by_cap: dict[int, dict[tuple[str, int], Pair]] = {more: {}, fewer: {}}
    for pair in [*_of("caps", rows), *_of("lasting", rows)]:
        (cap,) = pair.echoed.row["caps"]
        if cap in by_cap and pair.echoed.row["ratio"] == ratio:
            key = pair.echoed.row["task"], pair.echoed.row["fresh_batches"]
            by_cap[cap][key] = pair
    return [
        [loss - by_cap[fewer][key].echoed.losses[seed] for seed, loss in pair.echoed.losses.items()]
        for key, pair in by_cap[more].items()
        if key in by_cap[fewer]
    ]


def _changes(found: Sequence[Sequence[float]]) -> str:
    """Tell in how many comparisons the loss is lower or level, and by how much at the most."""
    around = [Interval.of(differences) for differences in found]
    counts = {
        "lower": sum(each.high < 0 for each in around),
        "level": sum(each.low <= 0 <= each.high for each in around),
        "higher": sum(each.low > 0 for each in around),
    }
    medians = [statistics.median(differences) for differences in found]
    said = ", ".join(f"{name} in {count}" for name, count in counts.items() if count)
    return f"{said} of {len(found)} (medians {min(medians):+.3f} to {max(medians):+.3f})"


def _outcomes(found: Sequence[Pair]) -> str:
    outcomes = [pair.outcome for pair in found]
    said = ", ".join(
        f"{name} in {outcomes.count(kind)}"
        for kind, name in (("helped", "lower"), ("level", "level"), ("harm", "higher"))
        if kind in outcomes
    )
    return f"{said} of {len(found)}"


def _around(values: Sequence[float]) -> str:
    around = Interval.of(values)
    return f"{statistics.median(values):+.3f} [{around.low:+.3f}, {around.high:+.3f}]"


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
            passes = round(passes_of(row))
            said.append(
                f"{row['examples']:,} examples of {TITLES[row['task']]}, {passes} passes with 4 "
                f"uses {_median(pair.echoed.losses):.3f}, {4 * passes} passes without "
                f"{longer:.3f}"
            )
    return said


def _median(losses: dict[int, float]) -> float:
    return statistics.median(losses.values())


SAID: dict[str, Callable[[Sequence[Row]], list[str] | str]] = {
    "readme": readme,
    "lasting": lasting,
    "caps": caps,
    "max factor": max_factor,
    "places": places,
    "passes": passes,
    "rules": rules,
}
