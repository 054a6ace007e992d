"""The table in docs/slow-examples.md, made of the rows."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.equal_time.tables import TITLES, chosen
from experiments.method import Interval
from experiments.suite.rows import RESULTS

ROWS = RESULTS / "slow_classes.json"
PAGE = RESULTS.parents[1] / "docs" / "slow-examples.md"

_BLOCK = re.compile(r"(<!-- rows: slow classes -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = ("task", "order", "loss", "less that in order", "accuracy", "less that in order")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each task and order: medians of the seeds, intervals of pairs."""
    lines = [_HEAD, ("---", "---", *["---:"] * 4)]
    for row in rows:
        found = chosen(row)
        base = chosen(next(r for r in rows if (r["task"], r["order"]) == (row["task"], "in order")))
        cells = [TITLES[row["task"]], row["order"]]
        for values, before in ((found.losses, base.losses), (found.metrics, base.metrics)):
            pairs = [values[seed] - before[seed] for seed in values]
            around = Interval.of(pairs)
            cells.append(f"{statistics.median(values.values()):.3f}")
            cells.append(
                f"{statistics.median(pairs):+.3f} [{around.low:+.3f}, {around.high:+.3f}]"
                if row["order"] != "in order"
                else ""
            )
        lines.append(tuple(cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(text: str) -> str:
    """Return the page with the table of the rows."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    return _BLOCK.sub(lambda match: f"{match[1]}{table(rows)}\n{match[2]}", text)


def write() -> None:
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
