"""docs/scale.md: its tables and its figure, made of the rows in `experiments/results`.

The tables stand between `<!-- rows: ... -->` and `<!-- end -->`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.scale.simulation import ROWS, Loss, Traffic, read_rows

PAGE = ROWS.parents[2] / "docs" / "scale.md"
FIGURE = PAGE.with_suffix(".svg")

_BLOCK = re.compile(r"(<!-- rows: (?P<what>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COLOURS = {False: "#b2182b", True: "#2166ac"}


def with_tables(text: str, rows: Path = ROWS) -> str:
    """Return a page with the tables of the rows."""
    traffic, losses = read_rows(rows)
    tables = {"traffic": traffic_table(traffic), "losses": loss_table(losses)}
    return _BLOCK.sub(lambda m: f"{m[1]}\n{tables[m['what']]}\n\n{m[3]}", text)


def write() -> list[Path]:
    """Write the tables into the page, and the figure beside it; return what was written."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    write_figure(FIGURE, read_rows()[0])
    return [PAGE, FIGURE]


def traffic_table(rows: Sequence[Traffic]) -> str:
    """Return a line a cluster."""
    head = (
        "nodes", "ranks a node", "batch", "dealt", "fullest node", "remote", "requests a step",
        "items a request", "hottest node", "a rank's order, ms a step",
    )  # fmt: skip
    return _table(
        head,
        [
            (
                f"{row.cluster.nodes:,}{_weights(row)}",
                str(row.cluster.ranks_each),
                f"{row.cluster.batch:,}",
                "yes" if row.cluster.dealt else "no",
                f"{row.fullest:.3f}",
                f"{100 * row.remote:.1f} %",
                f"{row.requests:.1f}",
                f"{row.items:.1f}",
                f"{row.hottest:.2f}",
                f"{row.order_ms:.2f}",
            )
            for row in rows
        ],
    )


def loss_table(rows: Sequence[Loss]) -> str:
    """Return a line a cluster."""
    head = ("nodes", "lost", "moved besides", "read again", "read as it comes back")
    return _table(
        head,
        [
            (
                f"{row.nodes:,}",
                *(f"{100 * x:.2f} %" for x in (row.lost, row.moved, row.read_again, row.back)),
            )
            for row in rows
        ],
    )


def _weights(row: Traffic) -> str:
    weights = row.cluster.weights
    return "" if len(weights) == 1 else f", of {':'.join(map(str, weights))}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_figure(path: Path, rows: Sequence[Traffic]) -> None:
    """Draw the remote share over nodes and over the batch. The same rows give the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    over_nodes, over_batch = figure.subplots(1, 2)
    plain = [row for row in rows if row.cluster.ranks_each == 1 and row.cluster.weights == (1,)]
    for dealt in (False, True):
        points = [r for r in plain if r.cluster.batch == 256 and r.cluster.dealt == dealt]
        _line(over_nodes, points, "nodes", dealt)
    points = sorted(
        (r for r in plain if r.cluster.nodes == 10 and r.cluster.dealt),
        key=lambda row: row.cluster.batch,
    )
    _line(over_batch, points, "batch", True)
    batches = [row.cluster.batch for row in points]
    rule = [40 / math.sqrt(batch) for batch in batches]
    over_batch.plot(batches, rule, color="#888888", linewidth=1, linestyle="--")
    over_batch.annotate("0.4 / sqrt(batch)", (batches[0], rule[0]), (8, 4), fontsize=8,
                        textcoords="offset points")  # fmt: skip
    over_nodes.set_xlabel("nodes, 256 examples a rank and step")
    over_batch.set_xlabel("examples a rank and step, 10 nodes, dealt")
    for panel in (over_nodes, over_batch):
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_ylabel("read from other nodes, %")
        panel.grid(color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stoker"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _line(panel: Any, rows: Sequence[Traffic], over: str, dealt: bool) -> None:
    at = [getattr(row.cluster, over) for row in rows]
    shares = [100 * row.remote for row in rows]
    panel.plot(at, shares, "o-", color=_COLOURS[dealt], linewidth=1.8, markersize=4)
    if over == "nodes":
        panel.annotate("dealt" if dealt else "not dealt", (at[-1], shares[-1]), (-8, -14),
                       fontsize=9, ha="right", textcoords="offset points")  # fmt: skip
