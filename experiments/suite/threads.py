"""The exact clock against real threads: storage and training steps that sleep, and no network.

`experiments/run clock` goes through a few runs in both ways and keeps what they took. Nothing else
rests on these times. Sleeping takes longer on a busy machine: where storage does not come to the
speed that was asked for, the comparison is refused.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.arms import Arm, epoch_after_epoch
from experiments.result_files import this_machine, write_whole
from experiments.suite.exact_clock import exact_run
from experiments.suite.feeds import READERS, Counts, feed
from experiments.suite.rows import CLOCK
from experiments.suite.workload import Workload

ARMS = tuple(
    replace(arm, slowness=ratio)
    for ratio in (2.0, 4.0)
    for arm in (Arm("none"), Arm("before", 4), Arm("batch", 4), Arm("before", "auto"))
)

STEP_S = 0.02
"""Longer than in the study: what a busy machine adds to a sleep is then a small share of it."""
BATCHES = 100
"""Fresh batches of a run."""

_TIMED_BATCHES = 40
_WARM_UP = 10
_ROUNDS = 6
_CLOSE_ENOUGH = 0.02
_TOO_FAR = 0.05


class CalibrationError(ValueError):
    """Storage did not come to the speed that was asked for."""


def calibrated(workload: Workload, ratio: float) -> float:
    """Return the seconds that a batch must take to be read, such that one comes every R steps.

    Raises CalibrationError if that is not found.
    """
    wanted_s = ratio * workload.recipe.step_s
    read_s, found = wanted_s, dict[float, float]()
    for _ in range(_ROUNDS):
        pipeline = feed(workload, Arm("none"), 0, read_s=read_s)
        with closing(epoch_after_epoch(pipeline)) as batches:
            for _ in islice(batches, _WARM_UP):
                pass
            started = time.perf_counter()
            for _ in islice(batches, _TIMED_BATCHES):
                pass
            batch_s = (time.perf_counter() - started) / _TIMED_BATCHES
        found[abs(batch_s / wanted_s - 1)] = read_s
        if min(found) <= _CLOSE_ENOUGH:
            break
        read_s = max(1e-4, read_s + wanted_s - batch_s)
    return closest(found, wanted_s)


def closest(found: dict[float, float], wanted_s: float) -> float:
    """Return the seconds with the least error, by errors as shares of `wanted_s`.

    Raises CalibrationError if that is above 5 %.
    """
    error = min(found)
    if error > _TOO_FAR:
        raise CalibrationError(
            f"storage was asked for a batch every {wanted_s * 1e3:.1f} ms, and came no closer than "
            f"{error:.0%} in {len(found)} rounds: nothing is timed with it. Is the machine busy?"
        )
    return found[error]


def timed_run(workload: Workload, arm: Arm, seed: int, read_s: float) -> dict[str, Any]:
    """Go through a whole run with steps that sleep; return what it took.

    `step_s` and `batch_s` are the means of a step and of storage for a fresh batch, in this run.
    """
    recipe = workload.recipe
    took_s: list[float] = []
    pipeline = feed(workload, arm, seed, read_s=read_s, took_s=took_s)
    counts = Counts(recipe)
    stepped_s = 0.0
    began = time.perf_counter()
    with closing(epoch_after_epoch(pipeline)) as batches:
        while not counts.is_over:
            next(batches)
            stepped = time.perf_counter()
            counts.add_of(pipeline)
            time.sleep(max(0.0, stepped + recipe.step_s - time.perf_counter()))
            stepped_s += time.perf_counter() - stepped
        ended = time.perf_counter()
    steps, fresh, uses = counts.latest
    return {
        "step_s": round(stepped_s / steps, 5),
        "batch_s": round(statistics.fmean(took_s) * recipe.batch_size / READERS, 5),
        "steps": steps,
        "factor": round(uses / fresh, 3),
        "seconds": round(ended - began, 3),
    }


def held_against(workload: Workload, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm: both clocks, the exact one with the other's means.

    Raises CalibrationError.
    """
    batches = BATCHES * workload.recipe.batch_size
    recipe = replace(workload.recipe, step_s=STEP_S, budget_fresh=batches)
    workload.recipe = recipe
    read_s = {ratio: calibrated(workload, ratio) for ratio in {arm.slowness for arm in ARMS}}
    for arm in ARMS:
        threads = timed_run(workload, arm, seed, read_s[arm.slowness])
        workload.recipe = replace(recipe, step_s=threads["step_s"])
        ratio = threads["batch_s"] / threads["step_s"]
        found = exact_run(workload, replace(arm, slowness=ratio), seed)
        workload.recipe = recipe
        steps, fresh, uses, seconds = found["points"][-1]
        exact = {"steps": steps, "factor": round(uses / fresh, 3), "seconds": round(seconds, 3)}
        key = {"place": arm.place, "factor": arm.factor, "ratio": arm.slowness}
        yield {"workload": workload.name, "arm": key, "threads": threads, "exact": exact}


def write(workload: Workload) -> Path:
    """Keep the comparison in a file. Raises CalibrationError, and leaves the file as it is then."""
    lines = ",\n".join(json.dumps(row) for row in held_against(workload))
    head = json.dumps({"machine": this_machine()})
    write_whole(CLOCK, head[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    return CLOCK
