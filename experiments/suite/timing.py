"""When things happen: real threads, storage and steps that sleep, and no network.

Nothing is computed but what feeding needs, so that the cores of the machine do not decide how long
training waits.
"""

from __future__ import annotations

import time
from contextlib import closing
from itertools import islice
from typing import Any

from experiments.arms import Arm, epoch_after_epoch
from experiments.suite.feeds import Counts, feed
from experiments.suite.workload import Workload

_TIMED_BATCHES = 40
_WARM_UP = 10
_ROUNDS = 4
_CLOSE_ENOUGH = 0.02


def storage_speed(workload: Workload, arm: Arm) -> dict[str, Any]:
    """Return how long a batch must take to be read (`read_s`), such that one comes every R steps.

    `arm` gives R and what is read: a pipeline's source or a loader. Measured is `batch_s`, the time
    from batch to batch of what is read as fast as possible.
    """
    wanted_s = arm.slowness * workload.recipe.step_s
    read_s = wanted_s
    for _ in range(_ROUNDS):
        pipeline = feed(workload, Arm(arm.place), 0, read_s=read_s)
        with closing(epoch_after_epoch(pipeline)) as batches:
            for _ in islice(batches, _WARM_UP):
                pass
            started = time.perf_counter()
            for _ in islice(batches, _TIMED_BATCHES):
                pass
            batch_s = (time.perf_counter() - started) / _TIMED_BATCHES
        if abs(batch_s / wanted_s - 1) <= _CLOSE_ENOUGH:
            break
        read_s = max(1e-4, read_s + wanted_s - batch_s)
    return {"read_s": round(read_s, 6), "batch_s": round(batch_s, 6)}


def timed_run(workload: Workload, arm: Arm, seed: int, read_s: float) -> dict[str, Any]:
    """Go through a whole run with steps that sleep; return when it was where.

    `points` has a row at each point of the grid: steps, fresh examples, uses, and seconds since the
    run began. `waited_fraction` leaves out the first batch, as its wait starts threads.
    """
    recipe = workload.recipe
    pipeline = feed(workload, arm, seed, read_s=read_s)
    counts = Counts(recipe)
    points: list[list[float]] = []
    waited_s = 0.0
    began = time.perf_counter()
    with closing(epoch_after_epoch(pipeline)) as batches:
        first: float | None = None
        while not counts.is_over:
            asked = time.perf_counter()
            next(batches)
            stepped = time.perf_counter()
            if first is None:
                first = stepped
            else:
                waited_s += stepped - asked
            is_point = counts.add(pipeline)
            time.sleep(max(0.0, stepped + recipe.step_s - time.perf_counter()))
            if is_point:
                points.append([*counts.latest, round(time.perf_counter() - began, 4)])
        ended = time.perf_counter()
        record = pipeline.record() if arm.follows else None
        copy_distance = pipeline.stats().copy_distance
    assert first is not None
    return {
        "points": points,
        "waited_fraction": round(waited_s / (ended - first), 4),
        "copy_distance": round(copy_distance, 1),
        "digest": counts.digest,
        "record": record,
    }
