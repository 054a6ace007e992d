"""Does echoing still pay where training ends? A language model, verbatim copies, to convergence.

Registered on 29 November 2026, before anything here was run.

The question. Trainings for equal time ended sooner than training without echoing could have gone
on. Here a text is gone over until more passes bring nothing, on storage that takes R steps' time
for a batch. Nothing is random behind the echo, so its copies are as bad as copies can be, and they
come soon, where passes bring them an epoch apart.

Trainings. 1,280 windows of 32 words of wikitext-2, the 255 most frequent and all others as one; one
layer of a transformer, 32 wide, AdamW, batches of 8 (so 160 a pass). Three arms: no echo; an echo
that follows the stall, a pool of 16 batches, at most 4 uses, at R = 2 and at R = 4
(`equal_time.schedules`: stoker's own decisions, by the exact clock). At as many passes all take the
same time and read as many fresh words. Each number of passes is a training of its own, with a
schedule of its own: warm-up, then half a cosine to 0.

Convergence. Passes double, from 1. An arm is over at the first number of passes whose validation
loss is not more than 0.005 below that of half as many. It has converged where its validation loss
is least.

Tuning. For each arm and number of passes, by the mean validation loss of two seeds that are used
for nothing else: from a peak rate of 0.01 and a warm-up of a fifth (then from what was best for
half as many passes), rate and warm-up are halved and doubled until the best has worse ones on all
four sides, so that it is inside what was tried. Warm-ups are 0.025 to 0.8 of the training. Test
losses are those of five other seeds, differences are of pairs, intervals as `method.Interval`.

Measures, for each R:

- the test loss where an echo has converged, less that where training without echoing has;
- how many times as soon: of both losses where they have converged, the worse one is the target, by
  seed; the time to it is read between trainings on a line over the logarithm of their length;
- the difference at as many passes, which is equal time and equal fresh words, wherever both ran;
- the price of soon: what an echo's loss is above that of as many steps without echoing, whose
  copies come an epoch later. That is what a cache makes possible where the text fits into one.

What counts against echoing:

1. Where it has converged its loss is higher, the interval above 0.
2. It is not sooner: the interval is not above 1.
3. At equal time its loss is higher, the interval above 0, at a number of passes at which training
   without echoing has not yet converged.

And a rule of `equal_time.sentences`, found on other trainings, is put to the test: with nothing
random behind the echo, two passes or more may end higher, and fewer do not.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

# Before NumPy: one core, whatever else runs.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
import torch
import typer

from experiments.equal_time import data
from experiments.equal_time.plan import Settings
from experiments.equal_time.schedules import NONE, EchoArm, schedule_of
from experiments.equal_time.tasks import Words
from experiments.equal_time.training import train

ROWS = Path(__file__).resolve().parent / "results" / "converged.jsonl"
ARMS = (NONE, EchoArm("before", 2, (4,)), EchoArm("before", 4, (4,)))
START = Settings(0.01, 0.2)
LEAST_WARM_UP, MOST_WARM_UP = 0.025, 0.8
LEAST_FALL = 0.005

Row = dict[str, Any]
Known = dict[tuple[Any, ...], Row]


class FewWords(Words):
    """A small model of few words, so that an hour of one core is enough."""

    vocabulary, width, heads, batch_size = 256, 32, 2, 8


class Plan(NamedTuple):
    """How much is trained."""

    examples: int = 1_280
    seeds: range = range(5)
    tuning_seeds: range = range(1_000, 1_002)


WHOLE = Plan()
QUICK = Plan(32, range(1), range(1_000, 1_001))

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    texts: Annotated[Path, typer.Argument(help="A folder with `wikitext-2`, as `data.pack` has.")],
    out: Annotated[Path, typer.Option(help="The file of trainings, which are kept.")] = ROWS,
    quick: Annotated[bool, typer.Option("--quick", help="Little text, to find errors.")] = False,
) -> None:
    """Train what is missing in the file, on one core; it may be stopped at any time."""
    began = time.monotonic()
    run(
        out,
        texts,
        lambda text: typer.echo(f"{time.monotonic() - began:6.1f} s  {text}"),
        QUICK if quick else WHOLE,
    )


def run(file: Path, texts: Path, say: Callable[[str], None], plan: Plan = WHOLE) -> None:
    """Add a line to the file as each training ends, until all arms are over.

    Args:
        texts: a folder with `wikitext-2/train.block-shuffled.txt` and `wikitext-2/test.txt`.
    """
    torch.set_num_threads(1)
    known = {_key(row): row for row in read(file)}
    with tempfile.TemporaryDirectory(prefix="stoker-converged-") as folder:
        for name, array in data.words(texts).items():
            few = np.where(array < FewWords.vocabulary, array, 0)
            np.save(Path(folder) / f"words-{name}.npy", few)
        task = FewWords(Path(folder), "cpu", plan.examples, augments=False)
        for wanted in _trainings(known, plan):
            row = wanted | _trained(task, wanted, plan)
            known[_key(row)] = row
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
            say(f"{_key(row)}: {row['validation']:.4f}")


def read(file: Path = ROWS) -> list[Row]:
    """Return the trainings of a file; none if there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _trainings(known: Known, plan: Plan) -> Iterator[Row]:
    """Yield what is to be trained next, until nothing is."""
    going, passes = list(ARMS), 1
    while going:
        for arm in going:
            while untried := _untried(arm, passes, known, plan):
                for settings in untried:
                    yield from _missing(arm, passes, settings, plan.tuning_seeds, known)
            best, _ = _best(arm, passes, known, plan)
            yield from _missing(arm, passes, best, plan.seeds, known)
        going = [arm for arm in going if _goes_on(arm, passes, known, plan)]
        passes *= 2


def _missing(
    arm: EchoArm, passes: int, settings: Settings, seeds: range, known: Known
) -> Iterator[Row]:
    for seed in seeds:
        wanted = _row(arm, passes, settings, seed)
        if _key(wanted) not in known:
            yield wanted


def _untried(arm: EchoArm, passes: int, known: Known, plan: Plan) -> list[Settings]:
    """Return the settings to be tried next; none when the best has worse ones on all sides."""
    tried = _tried(arm, passes, known, plan)
    if not tried:
        return [START if passes == 1 else _best(arm, passes // 2, known, plan)[0]]
    rate, warm_up = _best(arm, passes, known, plan)[0]
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


def _tried(arm: EchoArm, passes: int, known: Known, plan: Plan) -> dict[Settings, float]:
    """Return the mean validation losses of settings whose tuning seeds are all there."""
    found: dict[Settings, list[float]] = {}
    for row in known.values():
        if (row["arm"], row["passes"]) == (arm.name, passes) and row["seed"] in plan.tuning_seeds:
            settings = Settings(row["learning_rate"], row["warm_up"])
            found.setdefault(settings, []).append(row["validation"])
    return {
        settings: statistics.fmean(losses)
        for settings, losses in found.items()
        if len(losses) == len(plan.tuning_seeds)
    }


def _best(arm: EchoArm, passes: int, known: Known, plan: Plan) -> tuple[Settings, float]:
    """Return the settings with the least validation loss, and that."""
    return min(_tried(arm, passes, known, plan).items(), key=lambda each: each[1])


def _goes_on(arm: EchoArm, passes: int, known: Known, plan: Plan) -> bool:
    """Whether the validation loss still fell at this number of passes."""
    if passes == 1:
        return True
    _, before = _best(arm, passes // 2, known, plan)
    return _best(arm, passes, known, plan)[1] < before - LEAST_FALL


def _trained(task: Words, wanted: Row, plan: Plan) -> Row:
    (arm,) = (arm for arm in ARMS if arm.name == wanted["arm"])
    batches = plan.examples // task.batch_size * wanted["passes"]
    schedule = schedule_of(arm, plan.examples, task.batch_size, batches, wanted["seed"])
    settings = Settings(wanted["learning_rate"], wanted["warm_up"])
    found = train(task, [wanted["seed"]], [schedule], [settings])
    (steps,), (waits,) = found["steps"], found["waits"]
    losses = {part: found[part][0][0] for part in ("validation", "test")}
    return {"steps": steps, "waits": waits, **losses}


def _row(arm: EchoArm, passes: int, settings: Settings, seed: int) -> Row:
    return {"arm": arm.name, "passes": passes, **settings._asdict(), "seed": seed}


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("arm", "passes", "learning_rate", "warm_up", "seed"))


if __name__ == "__main__":
    app(prog_name="python -m experiments.converged")
