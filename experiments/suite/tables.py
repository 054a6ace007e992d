"""The comparison as a table: on a terminal, and in Markdown for the documentation."""

from __future__ import annotations

import json

from rich.table import Table

from experiments.arms import Arm
from experiments.method import Interval, Ratios
from experiments.suite.plan import Plan
from experiments.suite.rows import CLOCK, WARM_UP, Rows
from experiments.suite.summary import TARGET_SHARE, ArmSummary, Comparison, compared

VOID = "†"
"""Flags a speed-up that cannot be (``Comparison.is_void``)."""

Cells = tuple[list[str], list[list[str]]]
"""Column heads, and rows."""


def cells_of(found: Comparison, metric: str) -> Cells:
    """Return the table of all arms; a miss is never left out."""
    head = [
        "arm",
        "rate",
        "warm-up",
        "rho",
        *(f"speed-up, R = {ratio:g}" for ratio in found.ratios),
        "loss",
        metric,
        "factor",
        "apart",
        "steps",
        "missed",
    ]
    return head, [_row(each, found) for each in found.arms]


def _row(each: ArmSummary, found: Comparison) -> list[str]:
    arm = each.arm
    at = f", R = {arm.slowness:g}" if arm.follows else ""
    is_baseline = not arm.echoes
    return [
        arm.label + at,
        f"{each.learning_rate:g}",
        f"({WARM_UP:.0%})" if each.warm_up is None else f"{each.warm_up:.0%}",
        "1" if is_baseline else ratio_text(each.fresh_ratios),
        *(
            "1"
            if is_baseline
            else ratio_text(each.speedups[ratio]) + f" {VOID}" * found.is_void(each, ratio)
            if ratio in each.speedups
            else ""
            for ratio in found.ratios
        ),
        "0" if is_baseline else _difference_text(each),
        f"{each.metric:.3f}",
        f"{each.factor:.2f}",
        f"{each.copy_distance:.1f}" if arm.echoes else "",
        "missed" if each.steps is None else f"{each.steps:,.0f}",
        f"{each.misses} of {each.seeds}",
    ]


def ratio_text(ratios: Ratios) -> str:
    """Tell a median and its interval."""
    if ratios.median is None:
        return "missed"
    text = f"{'≥ ' * ratios.are_bounds}{ratios.median:.2f}"
    if len(ratios.values) == 1:
        return text
    around = Interval.of(ratios.values)
    low = f"{around.low:.2f}" if around.low else "missed"
    return f"{text} [{low}, {around.high:.2f}]"


def _difference_text(each: ArmSummary) -> str:
    text = f"{each.losses.median:+.3f}"
    if len(each.losses.values) == 1:
        return text
    around = each.losses.interval
    return f"{text} [{around.low:+.3f}, {around.high:+.3f}]"


def markdown(cells: Cells) -> str:
    """Lay out a table in Markdown."""
    head, rows = cells
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def terminal_tables(plan: Plan, rows: Rows) -> list[Table | str]:
    """Return what is shown at the end of an experiment."""
    found = compared(rows)
    if found is None:
        return []
    head, lines = cells_of(found, plan.workload.metric)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(head):
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    for line in lines:
        table.add_row(*line)
    return [table, sentence(found, plan.recipe.budget_fresh)]


def sentence(found: Comparison, budget_fresh: int) -> str:
    """Say what the target is, and what is in the brackets."""
    confidence = Interval.of([0.0] * found.seeds).confidence
    seeds = "1 seed" if found.seeds == 1 else f"{found.seeds} seeds"
    around = f", in brackets with {confidence:.0%} confidence" if found.seeds > 1 else ""
    return (
        f"Target: a test loss of {found.target:.3f}, reached by training without echoing after "
        f"{TARGET_SHARE:.0%} of {budget_fresh:,} fresh examples. Medians over {seeds}{around}. "
        "rho: fresh examples to the target without echoing, divided by those with echoing; "
        "speed-up: the same for seconds; loss: the difference at the end; apart: steps between "
        "two uses." + _note(found)
    )


def _note(found: Comparison) -> str:
    """Say what the flag means, where there is one."""
    if not any(found.is_void(each, ratio) for each in found.arms for ratio in each.speedups):
        return ""
    return (
        f" {VOID}: above R. The arm needs fewer steps than training without echoing, whose rate or "
        "warm-up is then not its best. Void, and in no summary, price or sentence."
    )


def clock_cells() -> Cells:
    """Return the table of the exact clock against real threads."""
    rows = json.loads(CLOCK.read_text(encoding="utf-8"))["rows"]
    head = ["arm", "R", "seconds, exact", "threads", "factor, exact", "threads"]
    return head, [
        [
            Arm(row["arm"]["place"], row["arm"]["factor"]).label,
            f"{row['arm']['ratio']:g}",
            *(f"{row[clock]['seconds']:.2f}" for clock in ("exact", "threads")),
            *(f"{row[clock]['factor']:.2f}" for clock in ("exact", "threads")),
        ]
        for row in rows
    ]
