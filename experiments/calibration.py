"""Setting the storage's speed so that R is what the demonstration promises, and measuring it.

R = t_upstream / t_downstream. Downstream is one training step with its batch in hand, on
one thread, with the loader at work beside it. Upstream is the production of one fresh
batch, reading and decoding, with no training beside it.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Calibration:
    """What storage of one slowness looks like on this machine."""

    wanted_ratio: float
    """R that was asked for."""
    ratio: float
    """R that was measured with the real loader."""
    limits: Limits
    """What the storage was limited to."""
    batch_s: float
    """Production time of a fresh batch, in seconds (t_upstream)."""
    step_s: float
    """Time of a training step with its batch in hand, in seconds (t_downstream)."""


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


def calibrate(
    images: ImageSet, settings: Settings, storage: Storage, ratio: float, step_s: float
) -> Calibration:
    """Find the limits that make R = `ratio`, and measure R with them.

    Where preparation alone takes longer, storage is as fast as it can be and R is what it is.
    """
    wanted_s = reading_s = ratio * step_s
    best: Calibration | None = None
    for _ in range(_ROUNDS):
        limits = storage.limits(reading_s)
        with storage.opened(limits) as source:
            batch_s = batch_seconds(images, settings, source)
        found = Calibration(ratio, batch_s / step_s, limits, batch_s, step_s)
        if best is None or abs(found.ratio - ratio) < abs(best.ratio - ratio):
            best = found
        if abs(best.ratio - ratio) <= _CLOSE_ENOUGH * ratio or (
            reading_s == 0 and batch_s > wanted_s
        ):
            break
        reading_s = max(0.0, reading_s + wanted_s - batch_s)
    assert best is not None
    return best
