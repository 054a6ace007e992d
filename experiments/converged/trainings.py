"""The trainings: each adds a line of JSON to a file, and what is there is not repeated."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.equal_time import data
from experiments.equal_time.plan import Settings
from experiments.equal_time.schedules import NONE, EchoArm, schedule_of
from experiments.equal_time.tasks import Words
from experiments.equal_time.training import train

ROWS = Path(__file__).resolve().parents[1] / "results" / "converged.jsonl"
ARMS = (NONE, EchoArm("before", 2, (4,)), EchoArm("before", 4, (4,)))
START = Settings(0.01, 0.2)
LEAST_WARM_UP, MOST_WARM_UP = 0.025, 0.8
LEAST_FALL = 0.005

Row = dict[str, Any]


class FewWords(Words):
    """A small model of few words, so that an hour of one core is enough."""

    vocabulary, width, heads, batch_size = 256, 32, 2, 8


class Plan(NamedTuple):
    """How much is trained."""

    examples: int = 1_280
    seeds: range = range(5)
    tuning_seeds: range = range(1_000, 1_002)
    most_passes: int = 1_024


WHOLE = Plan()
QUICK = Plan(32, range(1), range(1_000, 1_001), most_passes=1)


class Trainings:
    """What has been trained, and what is to be trained next.

    Args:
        rows: of the trainings that are over.
    """

    def __init__(self, rows: Iterable[Row], plan: Plan = WHOLE) -> None:
        self._plan = plan
        self._known = {_key(row): row for row in rows}

    def add(self, row: Row) -> None:
        """Keep what has been trained."""
        self._known[_key(row)] = row

    def missing(self) -> Iterator[Row]:
        """Yield what is to be trained next, each to be added before the next, until nothing is."""
        going, passes = list(ARMS), 1
        while going and passes <= self._plan.most_passes:
            for arm in going:
                while untried := self._untried(arm, passes):
                    for settings in untried:
                        yield from self._lacking(arm, passes, settings, self._plan.tuning_seeds)
                best, _ = self.best(arm, passes)
                yield from self._lacking(arm, passes, best, self._plan.seeds)
            going = [arm for arm in going if self._falls(arm, passes)]
            passes *= 2

    def best(self, arm: EchoArm, passes: int) -> tuple[Settings, float]:
        """Return the settings with the least mean validation loss, and that.

        Raises ValueError where none have been tried.
        """
        return min(self._tried(arm, passes).items(), key=lambda each: each[1])

    def lengths(self, arm: EchoArm) -> list[int]:
        """Return the numbers of passes whose seeds are all there, ascending."""
        found, passes = [], 1
        while self._tried(arm, passes) and not self._untried(arm, passes):
            best, _ = self.best(arm, passes)
            if not list(self._lacking(arm, passes, best, self._plan.seeds)):
                found.append(passes)
            passes *= 2
        return found

    def losses(self, arm: EchoArm, passes: int) -> list[float]:
        """Return the test losses with the best settings, a seed each."""
        best, _ = self.best(arm, passes)
        keys = (_key(_wanted(arm, passes, best, seed)) for seed in self._plan.seeds)
        return [self._known[key]["test"] for key in keys]

    def _lacking(
        self, arm: EchoArm, passes: int, settings: Settings, seeds: range
    ) -> Iterator[Row]:
        for seed in seeds:
            wanted = _wanted(arm, passes, settings, seed)
            if _key(wanted) not in self._known:
                yield wanted

    def _untried(self, arm: EchoArm, passes: int) -> list[Settings]:
        """Return the settings to be tried next; none if the best has worse ones on all sides."""
        tried = self._tried(arm, passes)
        if not tried:
            return [START if passes == 1 else self.best(arm, passes // 2)[0]]
        rate, warm_up = self.best(arm, passes)[0]
        around = [
            Settings(rate / 2, warm_up),
            Settings(rate * 2, warm_up),
            Settings(rate, warm_up / 2),
            Settings(rate, warm_up * 2),
        ]
        return [
            each
            for each in around
            if LEAST_WARM_UP <= each.warm_up <= MOST_WARM_UP and each not in tried
        ]

    def _tried(self, arm: EchoArm, passes: int) -> dict[Settings, float]:
        """Return the mean validation losses of settings whose tuning seeds are all there."""
        seeds = self._plan.tuning_seeds
        found: dict[Settings, list[float]] = {}
        for row in self._known.values():
            if (row["arm"], row["passes"]) == (arm.name, passes) and row["seed"] in seeds:
                settings = Settings(row["learning_rate"], row["warm_up"])
                found.setdefault(settings, []).append(row["validation"])
        return {
            settings: statistics.fmean(losses)
            for settings, losses in found.items()
            if len(losses) == len(seeds)
        }

    def _falls(self, arm: EchoArm, passes: int) -> bool:
        """Whether the validation loss still fell at this number of passes."""
        if passes == 1:
            return True
        _, before = self.best(arm, passes // 2)
        return self.best(arm, passes)[1] < before - LEAST_FALL


def run(file: Path, texts: Path, say: Callable[[str], None], plan: Plan = WHOLE) -> None:
    """Add a line to the file as each training ends, until all arms are over.

    Args:
        texts: a folder with `wikitext-2/train.block-shuffled.txt` and `wikitext-2/test.txt`.
    """
    torch.set_num_threads(1)
    trainings = Trainings(read(file), plan)
    with tempfile.TemporaryDirectory(prefix="stoker-converged-") as folder:
        for name, array in data.words(texts).items():
            few = np.where(array < FewWords.vocabulary, array, 0)
            np.save(Path(folder) / f"words-{name}.npy", few)
        task = FewWords(Path(folder), "cpu", plan.examples, augments=False)
        for wanted in trainings.missing():
            row = wanted | _trained(task, wanted, plan)
            trainings.add(row)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
            say(f"{_key(row)}: {row['validation']:.4f}")


def read(file: Path = ROWS) -> list[Row]:
    """Return the trainings of a file; none if there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _trained(task: Words, wanted: Row, plan: Plan) -> Row:
    (arm,) = (arm for arm in ARMS if arm.name == wanted["arm"])
    batches = plan.examples // task.batch_size * wanted["passes"]
    schedule = schedule_of(arm, plan.examples, task.batch_size, batches, wanted["seed"])
    settings = Settings(wanted["learning_rate"], wanted["warm_up"])
    found = train(task, [wanted["seed"]], [schedule], [settings])
    (steps,), (waits,) = found["steps"], found["waits"]
    losses = {part: found[part][0][0] for part in ("validation", "test")}
    return {"steps": steps, "waits": waits, **losses}


def _wanted(arm: EchoArm, passes: int, settings: Settings, seed: int) -> Row:
    return {"arm": arm.name, "passes": passes, **settings._asdict(), "seed": seed}


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("arm", "passes", "learning_rate", "warm_up", "seed"))
