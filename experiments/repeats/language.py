"""The language model: words of wikitext-2, verbatim, one training after another.

A line of JSON is added to the file as each training ends, and what is there is not repeated: the
command may be stopped at any time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.equal_time import data
from experiments.equal_time.plan import Settings
from experiments.equal_time.schedules import Schedule
from experiments.equal_time.tasks import Words
from experiments.equal_time.training import train
from experiments.repeats.orders import FRESH, SUBSET, Arm, order_of

MODEL = "words"
STEPS = 1_024
COUNTS = (8, 2, 32)
DISTANCES = ("pool of 16", "an epoch", "next step", SUBSET)
RATES = (0.0025, 0.005, 0.01, 0.02)
WARM_UP = 0.2
SEEDS, TUNING_SEED = range(5), 1_000


def arms(steps: int = STEPS) -> list[Arm]:
    """Return all arms, those that tell most first."""
    found = [Arm(FRESH, 1, steps >> n) for n in range(4)]
    found += [Arm(name, k, steps) for k in COUNTS for name in DISTANCES]
    return found + [Arm(FRESH, 1, steps >> n) for n in range(4, 7)]


def run(file: Path, texts: Path, say: Callable[[str], None], steps: int = STEPS) -> None:
    """Train what is missing in the file of rows.

    Args:
        texts: a folder with `wikitext-2/train.block-shuffled.txt` and `wikitext-2/test.txt`.
    """
    torch.set_num_threads(1)
    known = {_key(row): row for row in read(file)}
    with tempfile.TemporaryDirectory(prefix="stoker-repeats-") as folder:
        for name, array in data.words(texts).items():
            np.save(Path(folder) / f"words-{name}.npy", array)
        task = Words(Path(folder), "cpu", None, augments=False)
        for wanted in _trainings(known, steps):
            row = wanted | _trained(task, wanted)
            known[_key(row)] = row
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
            say(f"{_key(row)}: {row['test']:.4f}")


def read(file: Path) -> list[dict[str, Any]]:
    """Return the trainings of a file; none if there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def rows(trainings: list[dict[str, Any]], steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm whose five seeds are there, as those of the linear model."""
    known = {_key(row): row for row in trainings}
    for arm in arms(steps):
        rate = _best(arm, known)
        found = [known.get(_key(arm._asdict() | {"seed": seed, "rate": rate})) for seed in SEEDS]
        losses = [row["test"] for row in found if row is not None]
        if rate is not None and len(losses) == len(SEEDS):
            is_at_edge = rate in (RATES[0], RATES[-1])
            yield {
                "model": MODEL,
                **arm._asdict(),
                "rate": rate,
                "is_at_edge": is_at_edge,
                "losses": losses,
            }


def _trainings(known: dict[Any, dict[str, Any]], steps: int) -> Iterator[dict[str, Any]]:
    """Yield what is to be trained next, until nothing is."""
    for arm in arms(steps):
        for rate in RATES:
            wanted = arm._asdict() | {"seed": TUNING_SEED, "rate": rate}
            if _key(wanted) not in known:
                yield wanted
        for seed in SEEDS:
            wanted = arm._asdict() | {"seed": seed, "rate": _best(arm, known)}
            if _key(wanted) not in known:
                yield wanted


def _best(arm: Arm, known: dict[Any, dict[str, Any]]) -> float | None:
    """Return the rate with the least validation loss; None before all have been tried."""
    tried = [known.get(_key(arm._asdict() | {"seed": TUNING_SEED, "rate": r})) for r in RATES]
    found = [row for row in tried if row is not None]
    if len(found) < len(RATES):
        return None
    return float(min(found, key=lambda row: float(row["validation"]))["rate"])


def _trained(task: Words, wanted: dict[str, Any]) -> dict[str, float]:
    seed, arm = wanted["seed"], Arm(wanted["distance"], wanted["uses"], wanted["steps"])
    pieces = np.random.default_rng([seed, 0x7E87]).permutation(task.examples)
    items = pieces[order_of(arm, task.batch_size, seed)].astype(np.int32)
    nothing = np.zeros_like(items)
    progress = np.arange(1, arm.steps + 1) / arm.steps
    schedule = Schedule(items, nothing, nothing, progress, items.size, float(arm.steps))
    found = train(task, [seed], [schedule], [Settings(wanted["rate"], WARM_UP)])
    return {part: found[part][0][0] for part in ("validation", "test")}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("distance", "uses", "steps", "seed", "rate"))
