"""Setting the storage's speed such that training without echoing waits as much as is wanted.

R = 1 / (1 - waited): the time of a fresh batch over that of a training step, both as they are while
training without echoing runs. Here the storage is set for it, in a short run of that kind. What is
reported of an experiment is the R of its own runs.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

from experiments.arms import Arm, epoch_after_epoch, pipeline_of, upstream_of
from experiments.images import ImageSet
from experiments.settings import Settings
from experiments.storage import Limits, Source, Storage, in_memory
from experiments.workloads import Learner

_CLOSE_ENOUGH = 0.04
_ROUNDS = 4
_WAITS = 1.1


@dataclass(frozen=True)
class Calibration:
    """What storage of one slowness looks like on this machine."""

    wanted_ratio: float
    """R that was asked for."""
    ratio: float
    """R of a short run without echoing: `batch_s / step_s`."""
    limits: Limits
    """What the storage was limited to."""
    batch_s: float
    """Time from one batch to the next in that run, in seconds."""
    step_s: float
    """Part of it that the training step took, in seconds; the rest it waited."""


def step_seconds(images: ImageSet, settings: Settings) -> float:
    """Return the time of a training step in seconds, fed by the in-memory copy.

    With its loader beside it, as in the runs: a step alone on the machine is faster.
    """
    learner = Learner(len(images.classes), settings.widths, settings.learning_rate, seed=0)
    pipeline = pipeline_of(
        Arm("memory"),
        in_memory(images, settings),
        images,
        batch_size=settings.batch_size,
        pool_examples=0,
        seed=0,
    )
    times_s = []
    with closing(epoch_after_epoch(pipeline)) as batches:
        for batch in islice(batches, settings.step_samples * 4 // 3):
            started = time.perf_counter()
            learner.step(*batch)
            times_s.append(time.perf_counter() - started)
    return statistics.fmean(times_s[-settings.step_samples :])


def batch_seconds(images: ImageSet, settings: Settings, source: Source) -> float:
    """Return the production time of a fresh batch in seconds, with the real loader."""
    pipeline = upstream_of(source, images, batch_size=settings.batch_size, seed=0)
    warm_up = settings.drain_batches // 3
    timed = min(settings.drain_batches, len(pipeline) - warm_up)
    with iter(pipeline) as batches:
        for _ in range(warm_up):
            next(batches)
        started = time.perf_counter()
        for _ in range(timed):
            next(batches)
        return (time.perf_counter() - started) / timed


def without_echoing(images: ImageSet, settings: Settings, source: Source) -> tuple[float, float]:
    """Train without echoing for a moment; return seconds from batch to batch, and of a step."""
    learner = Learner(len(images.classes), settings.widths, settings.learning_rate, seed=0)
    pipeline = pipeline_of(
        Arm("none"), source, images, batch_size=settings.batch_size, pool_examples=0, seed=0
    )
    warm_up, timed = settings.drain_batches // 3, 2 * settings.drain_batches
    busy_s = 0.0
    with closing(epoch_after_epoch(pipeline)) as batches:
        for batch in islice(batches, warm_up):
            learner.step(*batch)
        started = time.perf_counter()
        for batch in islice(batches, timed):
            stepped = time.perf_counter()
            learner.step(*batch)
            busy_s += time.perf_counter() - stepped
        return (time.perf_counter() - started) / timed, busy_s / timed


def calibrate(
    images: ImageSet, settings: Settings, storage: Storage, ratio: float, step_s: float
) -> Calibration:
    """Find the limits that make R = `ratio` in a run without echoing, from a guess of a step.

    Where preparation alone takes longer, storage is as fast as it can be and R is what it is.
    """
    reading_s = ratio * step_s
    with storage.opened(storage.limits(reading_s)) as source:
        beside_reading_s = max(0.0, batch_seconds(images, settings, source) - reading_s)
    reading_s = max(0.0, reading_s - beside_reading_s)
    best: Calibration | None = None
    smallest = math.inf
    for _ in range(_ROUNDS):
        limits = storage.limits(reading_s)
        with storage.opened(limits) as source:
            batch_s, step_s = without_echoing(images, settings, source)
        # A run that does not wait says nothing of how fast its storage is.
        waits = batch_s > _WAITS * step_s
        produced_s = batch_s if waits else reading_s + beside_reading_s
        error = produced_s / (ratio * step_s) - 1
        if abs(error) < smallest:
            best = Calibration(ratio, batch_s / step_s, limits, batch_s, step_s)
            smallest = abs(error)
        if smallest <= _CLOSE_ENOUGH or (reading_s == 0 and error > 0):
            break
        reading_s = max(0.0, reading_s - error * ratio * step_s)
    assert best is not None
    return best
