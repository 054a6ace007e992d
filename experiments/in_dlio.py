"""A training inside DLIO, whose input and clock are not ours (`bench/dlio_training.py`), told."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from experiments.method import Interval

Row = dict[str, Any]

_ROWS = Path(__file__).resolve().parents[1] / "bench" / "results" / "dlio_training.json"
_TUNING_SEED = 1_000
_PLAIN = "DataLoader"
_PAIRS = (
    ("processes, echo", _PLAIN),
    ("processes, echo", "processes"),
    ("threads, echo", _PLAIN),
    ("threads, echo", "threads"),
)


def read() -> list[Row]:
    """Return the trainings that count."""
    rows: list[Row] = json.loads(_ROWS.read_text(encoding="utf-8"))["rows"]
    return sorted((row for row in rows if row["seed"] < _TUNING_SEED), key=lambda row: row["seed"])


def less(rows: list[Row], arm: str, other: str) -> tuple[float, Interval]:
    """Return by how much an arm's test loss is above another's, the median of pairs by seed."""
    losses = {name: [row["test"] for row in rows if row["arm"] == name] for name in (arm, other)}
    found = [a - b for a, b in zip(losses[arm], losses[other], strict=True)]
    return statistics.median(found), Interval.of(found)


def said(rows: list[Row]) -> list[str]:
    """Say where each arm ended, and what its echo did."""
    ends = []
    for arm in dict.fromkeys([_PLAIN, *(name for pair in _PAIRS for name in reversed(pair))]):
        trained = [row for row in rows if row["arm"] == arm]
        loss, steps = (
            statistics.median(row[name] for row in trained) for name in ("test", "steps")
        )
        ends.append(f"{arm} {loss:.3f} ({steps:,.0f} steps)")
    differences = []
    for arm, other in _PAIRS:
        middle, around = less(rows, arm, other)
        kind = "lower" if around.high < 0 else "higher" if around.low > 0 else "level"
        differences.append(
            f"{arm} to {other}: {kind}, {middle:+.3f} [{around.low:+.3f}, {around.high:+.3f}]"
        )
    return [
        f"**Test loss after 30 s**: {'; '.join(ends)}.",
        f"**With an echo**: {'; '.join(differences)}.",
    ]
