"""The figure: how many times as long training without echoing takes to end as well, by R."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from experiments.equal_time.tables import (
    TABLES,
    TITLES,
    Row,
    lengths_without,
    pairs,
    times_as_long,
)

_COLOURS = {"fashion": "#2166ac", "cifar": "#b2182b", "words": "#1b7837", "views": "#222222"}


def write(path: Path, rows: Sequence[Row]) -> None:
    """Draw a mark for each comparison; the same bytes for the same rows."""
    found = [pair for pair in pairs(rows) if TABLES["lasting"](pair.echoed.row)]
    with mpl.rc_context({"svg.hashsalt": "lasting", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        panel = figure.subplots()
        panel.axhline(1, color="#999999", linestyle="--", label="copies are worth nothing")
        ratios = [2 ** (n / 8) for n in range(25)]
        fresh = [min(4, ratio) for ratio in ratios]
        panel.plot(ratios, fresh, color="#999999", linestyle=":", label="as good as fresh")
        for at, (task, colour) in enumerate(_COLOURS.items()):
            of = [pair for pair in found if pair.echoed.row["task"] == task]
            for pair in of:
                times, row = times_as_long(pair, rows), pair.echoed.row
                longest = lengths_without(pair, rows)[-1][0] / row["fresh_batches"]
                panel.plot(
                    row["ratio"] * (0.94 + 0.04 * at),
                    longest if times is None else times,
                    "^" if times is None else "o",
                    color=colour,
                    markersize=3 + statistics.mean(pair.echoed.row["steps"]) ** 0.5 / 20,
                    alpha=0.8,
                    label=TITLES[task] if pair is of[0] else None,
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        panel.set_ylim(0, 4.6)
        panel.set_xlabel("R: steps' time that storage takes for a batch")
        panel.set_ylabel("times as long, without echoing")
        panel.legend(fontsize=8.5, frameon=False, loc="upper left")
        panel.grid(color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
