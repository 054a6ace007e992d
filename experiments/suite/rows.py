"""What is kept: a row for each run that is over, so that none is repeated.

A row is what identifies a run (`Run`), the digest of the recipe it followed, and what it found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import stoker
from experiments.arms import Arm
from experiments.result_files import this_machine, write_whole
from experiments.suite.workload import Recipe

RESULTS = Path(__file__).resolve().parents[1] / "results"
CLOCK = RESULTS / "clock.json"
"""What `threads` found."""

WARM_UP = 0.05
"""The warm-up that everything had before warm-ups were tuned."""

Kind = Literal["timing", "tuning", "training"]


@dataclass(frozen=True)
class Run:
    """One thing to be carried out."""

    kind: Kind
    arm: Arm
    """With the R it runs at, `arm.slowness`; 0 where that plays no role."""
    seed: int = 0
    learning_rate: float | None = None
    warm_up: float = WARM_UP
    """Share of the budget over which the rate rises."""

    @property
    def key(self) -> dict[str, Any]:
        """What identifies its row, beside the workload's variant."""
        return {
            "kind": self.kind,
            "place": self.arm.place,
            "transform": self.arm.transform,
            "factor": self.arm.factor,
            "ratio": self.arm.slowness,
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "warm_up": self.warm_up,
        }


class Rows:
    """The rows of one variant of a workload, of one recipe, in the file of all its variants.

    Args:
        path: the file; it need not exist.
        variant: the variant's name.
        recipe: rows that followed another one are as if they were not there, and go when a new
            row of this variant is written.
    """

    def __init__(self, path: Path, workload: str, variant: str, recipe: Recipe) -> None:
        self.path = path
        self._workload = workload
        self._variant = variant
        self._recipe = digest_of(recipe)
        others: list[dict[str, Any]] = []
        self._mine: dict[str, dict[str, Any]] = {}
        for row in read_rows(path):
            if row["variant"] != variant:
                others.append(row)
            elif row["recipe"] == self._recipe:
                self._mine[_name(row)] = row
        self._others = others

    def find(self, run: Run) -> dict[str, Any] | None:
        """Return the row of a run, None if it is not over."""
        return self._mine.get(_name(run.key))

    def of_kind(self, kind: Kind) -> Iterator[dict[str, Any]]:
        """Yield the rows of a kind."""
        return (row for row in self._mine.values() if row["kind"] == kind)

    def add(self, run: Run, found: dict[str, Any]) -> None:
        """Keep what a run found, in the file, too: whole or not at all."""
        made = {
            "recipe": self._recipe,
            "stoker": stoker.__version__,
            "written": datetime.now(UTC).isoformat(timespec="minutes"),
        }
        row = {"variant": self._variant, **run.key, **made, **found}
        if run.kind == "training":
            # An arm that was tuned anew leaves nothing of its earlier settings.
            old = replace(run, learning_rate=None, warm_up=WARM_UP).key
            self._mine = {
                name: each
                for name, each in self._mine.items()
                if each | {"learning_rate": None, "warm_up": WARM_UP} != each | old
            }
        self._mine[_name(run.key)] = row
        self._write()

    def drop(self, arms: Collection[Arm]) -> None:
        """Forget the rows of arms, to have them repeated: the file does when one is added."""
        dropped = {replace(arm, slowness=0.0) for arm in arms}
        self._mine = {
            name: row
            for name, row in self._mine.items()
            if replace(arm_of(row), slowness=0.0) not in dropped
        }

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) for row in [*self._others, *self._mine.values()]]
        head = json.dumps({"workload": self._workload, "machine": this_machine()})
        text = head[:-1] + ', "rows": [\n' + ",\n".join(sorted(lines)) + "\n]}\n"
        write_whole(self.path, text)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def digest_of(recipe: Recipe) -> str:
    """Return what stands for exactly this recipe."""
    return hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:8]


def arm_of(row: dict[str, Any]) -> Arm:
    """Return the arm of a row."""
    return Arm(row["place"], row["factor"], row["ratio"], row["transform"])


def _name(row: dict[str, Any]) -> str:
    names = ("kind", "place", "transform", "factor", "ratio", "seed", "learning_rate")
    # Rows from before warm-ups were tuned do not say theirs.
    return json.dumps([*(row[name] for name in names), row.get("warm_up", WARM_UP)])
