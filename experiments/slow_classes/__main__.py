"""Does it harm a training that slow examples come later? Two classes of ten are the slow ones.

    python -m experiments.slow_classes --packed FOLDER    # half an hour; writes rows and page
    python -m experiments.slow_classes --quick            # seconds; prints a table of made-up data

`python -m experiments.equal_time pack` makes the folder. Each seed has slow classes of its own, and
the same examples, weights and augmentation in every order.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stoker
from experiments.equal_time import data
from experiments.equal_time.plan import seeds_of
from experiments.equal_time.rows import best_setting, joined
from experiments.equal_time.schedules import DICE_SIDES, Schedule
from experiments.equal_time.tasks import Task, task_of
from experiments.equal_time.training import train
from experiments.result_files import this_machine, write_whole
from experiments.slow_classes import page
from experiments.slow_classes.orders import ORDERS
from experiments.suite.plan import TUNING_SEED, Settings

EPOCHS = 3
TASKS = {"fashion": (0.05, 0.1, 0.2), "cifar": (0.025, 0.05, 0.1)}
"""The tasks, and the rates that each order has to choose from."""
EXAMPLES = 12_800


def schedule_of(task: Task, classes: Any, name: str, epochs: int, seed: int) -> Schedule:
    """Return the steps of a training in one of the orders."""
    pipeline = stoker.from_dataset(range(task.examples), seed=seed).shuffle()
    items, dice = [], []
    for epoch in range(epochs):
        pipeline.set_epoch(epoch)
        order = np.asarray(list(pipeline), np.int32)
        is_slow = np.isin(classes[order], [seed % 10, (seed + 5) % 10])
        items.append(order[ORDERS[name](is_slow, task.batch_size)])
        rng = np.random.default_rng([seed, epoch])
        dice.append(rng.integers(DICE_SIDES, size=task.examples, dtype=np.int32)[items[-1]])
    shape = (-1, task.batch_size)
    steps = epochs * task.examples // task.batch_size
    return Schedule(
        np.concatenate(items).reshape(shape),
        np.zeros((steps, task.batch_size), np.int32),
        np.concatenate(dice).reshape(shape),
        np.arange(1, steps + 1) / steps,
        fresh=epochs * task.examples,
        waits=0.0,
    )


def simulate(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Train each task in each order; yield a row of each."""
    examples, epochs = (256, 2) if quick else (EXAMPLES, EPOCHS)
    seeds = seeds_of(1, 1) if quick else seeds_of()
    for name in TASKS:
        task = task_of(name)(folder, "cpu", examples, True)
        classes = np.load(folder / f"{name}-train-y.npy")[:examples]
        for order in ORDERS:
            schedules = {seed: schedule_of(task, classes, order, epochs, seed) for seed in seeds}
            yield {
                "task": name,
                "order": order,
                "examples": examples,
                "epochs": epochs,
                "seeds": seeds,
                **_trained(task, schedules),
            }


def _trained(task: Task, schedules: dict[int, Schedule]) -> dict[str, Any]:
    """Choose a rate by some seeds, and train the others with it."""
    settings = [Settings(rate, 0.2) for rate in TASKS[task.name]]
    tuning = [seed for seed in schedules if seed >= TUNING_SEED]
    counted = [seed for seed in schedules if seed < TUNING_SEED]
    tuned = train(task, tuning, [schedules[seed] for seed in tuning], settings)
    best = best_setting(tuned["validation"])
    found = train(task, counted, [schedules[seed] for seed in counted], [settings[best]])
    both = joined(found, tuned, best)
    kept = ("validation", "test", "test_metric", "took_s")
    return {"settings": [list(each) for each in settings], **{key: both[key] for key in kept}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; write rows and table, or print the table of the quick one."""
    parser = argparse.ArgumentParser("python -m experiments.slow_classes")
    parser.add_argument("--packed", type=Path, help="folder of packed data")
    parser.add_argument("--quick", action="store_true", help="a few steps, printed only")
    told = parser.parse_args(arguments)
    if not told.quick and told.packed is None:
        parser.error("--packed is needed: see `python -m experiments.equal_time pack --help`")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="stoker-slow-classes-") as temporary:
        folder, packed = Path(temporary), told.packed
        if told.quick:
            packed = folder / "packed"
            data.pack_made_up(packed)
        data.unpack(packed, folder)
        for row in simulate(folder, told.quick):
            rows.append(row)
            print(f"{row['task']}, {row['order']}: {row['took_s']:.0f} s", flush=True)
    if told.quick:
        print(page.table(rows))
        return
    lines = ",\n".join(json.dumps(row) for row in rows)
    machine = json.dumps(this_machine())
    write_whole(page.ROWS, f'{{"machine": {machine},\n"rows": [\n{lines}\n]}}\n')
    page.write()


if __name__ == "__main__":
    main()
