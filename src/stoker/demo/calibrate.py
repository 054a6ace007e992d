"""Setting the storage's latency so that R is what the demonstration promises, and measuring it.

R = t_upstream / t_downstream. Downstream is one training step with its batch in hand, on
one thread, with the loader at work beside it. Upstream is the production of one fresh
batch, reading and decoding, with no training beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from stoker.demo.arms import Arm, pipeline_of, source_of, upstream_of
from stoker.demo.images import ImageSet
from stoker.demo.settings import Settings
from stoker.demo.storage import EmulatedStorage
from stoker.demo.task import Learner

_CLOSE_ENOUGH = 0.04
_ROUNDS = 4


@dataclass(frozen=True)
class Calibration:
    """What storage of one slowness looks like on this machine."""

    wanted_ratio: float
    """R that was asked for."""
    ratio: float
    """R that was measured with the real loader."""
    latency_s: float
    """Emulated latency of every read, in seconds."""
    batch_s: float
    """Production time of a fresh batch, in seconds (t_upstream)."""
    step_s: float
    """Time of a training step with its batch in hand, in seconds (t_downstream)."""


def step_seconds(images: ImageSet, settings: Settings) -> float:
    """Return the time of a training step in seconds, fed by the in-memory copy.

    With its loader beside it, as in the runs: a step alone on the machine is faster.
    """
    arm = Arm("memory")
    learner = Learner(len(images.classes), settings.widths, settings.learning_rate, seed=0)
    pipeline = pipeline_of(
        arm,
        source_of(arm, images, 0.0),
        images,
        batch_size=settings.batch_size,
        pool_examples=0,
        readers=settings.readers,
        seed=0,
    )
    times_s: list[float] = []
    while True:
        with closing(iter(pipeline)) as batches:
            for batch in batches:
                started = time.perf_counter()
                learner.step(*batch)
                times_s.append(time.perf_counter() - started)
                if len(times_s) == settings.step_samples * 4 // 3:
                    return statistics.fmean(times_s[settings.step_samples // 3 :])


def batch_seconds(images: ImageSet, settings: Settings, latency_s: float) -> float:
    """Return the production time of a fresh batch in seconds, with the real loader."""
    source = EmulatedStorage(images.train_paths, images.train_labels, latency_s)
    pipeline = upstream_of(
        source, images, batch_size=settings.batch_size, readers=settings.readers, seed=0
    )
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
    images: ImageSet,
    settings: Settings,
    ratio: float,
    step_s: float,
    tell: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Find the latency that makes R = `ratio`, and measure R with it.

    Where preparation alone takes longer, the latency is 0 and R is what it is.
    """
    wanted_s = ratio * step_s
    latency_s = wanted_s * settings.readers / settings.batch_size
    best: Calibration | None = None
    for _ in range(_ROUNDS):
        tell(f"measuring the loader with {latency_s * 1e3:.1f} ms a read")
        batch_s = batch_seconds(images, settings, latency_s)
        found = Calibration(ratio, batch_s / step_s, latency_s, batch_s, step_s)
        if best is None or abs(found.ratio - ratio) < abs(best.ratio - ratio):
            best = found
        if abs(best.ratio - ratio) <= _CLOSE_ENOUGH * ratio or (
            latency_s == 0 and batch_s > wanted_s
        ):
            break
        latency_s = max(
            0.0, latency_s + (wanted_s - batch_s) * settings.readers / settings.batch_size
        )
    assert best is not None
    return best
