"""The figure: damage by number of uses and distance, a panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from experiments.repeats.damage import TITLES, Cost
from experiments.repeats.orders import SUBSET

_COLOURS = {
    "next step": "#b2182b",
    "8 steps": "#ef8a62",
    "pool of 16": "#2166ac",
    "pool of 64": "#67a9cf",
    "an epoch": "#1b7837",
    SUBSET: "#222222",
}


def write(path: Path, found: Sequence[Cost]) -> None:
    """Draw the medians of five seeds and their intervals; the same bytes for the same rows."""
    models = list(dict.fromkeys(cost.model for cost in found))
    with mpl.rc_context({"svg.hashsalt": "repeats", "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.2 * len(models), 4.0), layout="constrained")
        panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
        for panel, model in zip(panels, models, strict=True):
            _draw(panel, [cost for cost in found if cost.model == model])
            panel.set_title(TITLES[model], fontsize=10)
        panels[0].set_ylabel("share of the compute that was in vain")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8.5)
        figure.savefig(path, metadata={"Date": None})


def _draw(panel: Any, found: Sequence[Cost]) -> None:
    counts = [2 ** (n / 4) for n in range(4, 25)]
    panel.plot(
        counts,
        [1 - 1 / k for k in counts],
        color="#999999",
        linestyle="--",
        label="above: repeats are worth less than nothing",
    )
    for distance, colour in _COLOURS.items():
        of = sorted((c for c in found if c.arm.distance == distance), key=lambda c: c.arm.uses)
        of = [cost for cost in of if cost.arm.uses <= counts[-1]]
        if not of:
            continue
        middle = [cost.damage.median for cost in of]
        below = [cost.damage.median - cost.damage.low for cost in of]
        above = [cost.damage.high - cost.damage.median for cost in of]
        tenth = distance == SUBSET
        panel.errorbar(
            [cost.arm.uses for cost in of],
            middle,
            yerr=(below, above),
            color=colour,
            linewidth=1.6,
            elinewidth=0.9,
            capsize=2,
            marker="s" if tenth else "o",
            markersize=3,
            linestyle=":" if tenth else "-",
            label=f"{distance}, a tenth of the uses" if tenth else distance,
        )
    for cost in found:
        if cost.arm.distance == "evenly":
            label = "a tenth of the uses, evenly"
            panel.plot(2, cost.damage.median, "*", color="#762a83", markersize=9, label=label)
    panel.set_xscale("log", base=2)
    panel.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
    panel.set_ylim(-0.05, 1)
    panel.set_xlabel("uses of each example")
    panel.grid(color="#e6e6e6", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
