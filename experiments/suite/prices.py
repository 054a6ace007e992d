"""What `stoker analyze` tells of echoing: the speed-ups of all workloads, as the wheel has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from experiments.suite.plan import RATIOS
from experiments.suite.rows import RESULTS, Rows
from experiments.suite.sentences import is_clear
from experiments.suite.summary import compared
from experiments.suite.workload import Variant
from experiments.suite.workloads import NAMES, class_of

PATH = RESULTS.parents[1] / "src" / "stoker" / "analysis" / "model" / "echo_prices.json"


def prices_text(results: Path = RESULTS) -> str:
    """Return the file's content: an object a line."""
    return "[\n" + ",\n".join(json.dumps(price) for price in _prices(results)) + "\n]\n"


def _prices(results: Path) -> Iterator[dict[str, str | float | None]]:
    for name in NAMES:
        workload = class_of(name)
        recipe = workload.recipe_of(Variant(), quick=False)
        found = compared(Rows(results / f"{name}.json", name, Variant().name, recipe))
        if found is None:
            continue
        kinds = {"before": "before", "loader": "loader"}
        transform = workload.transforms[:1]
        for each in found.arms:
            kind = kinds.get(each.arm.place)
            if not each.arm.follows or each.arm.slowness not in RATIOS or kind is None:
                continue
            if each.arm.transform:
                if each.arm.transform not in transform:
                    continue
                kind += " with a transform"
            ratio = each.arm.slowness
            is_void = found.is_void(each, ratio)
            yield {
                "kind": kind,
                "workload": name,
                "ratio": ratio,
                "speedup": None if is_void else round(each.speedups[ratio].median or 0.0, 2),
                "is_clear": is_clear(each.speedups[ratio]),
                "at_most": round(found.bound(each, ratio), 2),
            }
