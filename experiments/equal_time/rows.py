"""The rows: a line of JSON for each cell that is over."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.equal_time.plan import Cell

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS = RESULTS / "equal_time.jsonl"


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the rows of a file, the last of each cell; none if it does not exist."""
    if not path.exists():
        return []
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[_name(row)] = row
    return list(found.values())


def best_setting(validation: Sequence[Sequence[float]]) -> int:
    """Return which setting has the least mean validation loss, given by seed and setting."""
    return min(
        range(len(validation[0])), key=lambda n: statistics.fmean(each[n] for each in validation)
    )


def joined(counted: dict[str, Any], tuned: dict[str, Any], best: int) -> dict[str, Any]:
    """Join what seeds that count found with one setting, and those that chose it with all.

    None stands for what was not trained.
    """
    absent = len(tuned["validation"][0]) - best - 1
    found: dict[str, Any] = {}
    for name, values in counted.items():
        if name == "took_s":
            found[name] = round(values + tuned[name], 2)
            continue
        if isinstance(values[0], list):
            values = [[None] * best + each + [None] * absent for each in values]
        found[name] = values + tuned[name]
    return found


def row_of(cell: Cell, seeds: list[int], found: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a cell."""
    arm = cell.arm
    return {
        **cell.key,
        "place": arm.place,
        "ratio": arm.ratio,
        "caps": list(arm.caps),
        "seeds": seeds,
        "settings": [list(each) for each in cell.settings],
        **found,
    }


def is_known(cell: Cell, rows: list[dict[str, Any]]) -> bool:
    """Whether a cell is over."""
    return any(_name(row) == _name(cell.key) for row in rows)


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _name(row: dict[str, Any]) -> str:
    return json.dumps(
        [row[key] for key in ("task", "examples", "augments", "fresh_batches", "arm")]
    )
