"""The scene: storage slows down and recovers while one arm trains, and its factor follows.

Nothing is restarted and nobody is told: reads begin to take longer, and later no longer do.

R is what it is while this arm runs, with steps timed beside this reading: they take longer than
beside the in-memory copy, for two cores and one interpreter are shared.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, islice

import stoker
from experiments.arms import FOLLOWING, epoch_after_epoch, pipeline_of
from experiments.calibration import Calibration
from experiments.images import ImageSet
from experiments.runs import pool_examples
from experiments.settings import Settings
from experiments.storage import EmulatedStorage, Limits, Source
from experiments.workloads import Learner

_BATCHES_A_ROW = 4
_ROUNDS = 3


@dataclass(frozen=True)
class Stretch:
    """A part of the scene, in which storage has one speed."""

    calibration: Calibration
    """That speed."""
    seconds: float
    """How long it lasts."""


@dataclass(frozen=True)
class SceneRow:
    """A moment of the scene; what is over a window ends with this moment."""

    seconds: float
    """Time since the scene began."""
    latency_s: float
    """Latency of a read that was set, in seconds."""
    ratio: float
    """R that was set, as measured."""
    factor: float
    """The echoing factor over a window of batches: uses for each fresh example."""
    waited_fraction: float
    """Share of the time of that window that training waited for a batch."""
    step_s: float
    """Mean time of a step in that window, in seconds."""


@dataclass(frozen=True)
class Scene:
    """What happened."""

    window_batches: int
    """Batches in a window."""
    stretches: Sequence[Stretch]
    rows: Sequence[SceneRow]

    @property
    def conclusion(self) -> str:
        """What one sees, in a sentence: medians over the second half of each stretch."""
        ratios, factors, waits = [], [], []
        for ratio, group in groupby(self.rows, key=lambda row: row.ratio):
            rows = list(group)
            settled = rows[len(rows) // 2 :]
            ratios.append(f"{ratio:.1f}")
            factors.append(f"{statistics.median(row.factor for row in settled):.1f}")
            waits.append(f"{statistics.median(row.waited_fraction for row in settled):.0%}")
        if len(ratios) < len(self.stretches):
            return "The storage changed faster than this machine trains: there is nothing to see."
        return (
            f"As the storage went to R = {_then(ratios)}, the factor went to {_then(factors)} by "
            f"itself, and training waited for {_then(waits)} of the time."
        )


def stretches_of(
    images: ImageSet, storage: EmulatedStorage, settings: Settings, known: Calibration
) -> list[Stretch]:
    """Find the latencies of the scene, with what is known of the storage at another one."""
    ratios = dict.fromkeys(ratio for ratio, _ in settings.scene)
    found = {ratio: _beside(images, storage, settings, ratio, known) for ratio in ratios}
    return [Stretch(found[ratio], seconds) for ratio, seconds in settings.scene]


def _beside(
    images: ImageSet, storage: EmulatedStorage, settings: Settings, ratio: float, known: Calibration
) -> Calibration:
    """Find the latency that makes R = `ratio` while the arm runs.

    The less is read, the shorter a step, and that says how much is to be read: so the latency
    follows the steps for a few rounds. What a batch takes besides reading stays what it is.
    """
    learner = _learner(images, settings)
    beside_reading_s = known.batch_s - storage.reading_s(known.limits)
    step_s = known.step_s

    def limits() -> Limits:
        return storage.limits(max(0.0, ratio * step_s - beside_reading_s))

    with (
        storage.opened(limits()) as source,
        closing(epoch_after_epoch(_pipeline(images, settings, source))) as batches,
    ):
        for _ in range(_ROUNDS):
            times_s = []
            for batch in islice(batches, settings.scene_step_samples):
                started = time.perf_counter()
                learner.step(*batch)
                times_s.append(time.perf_counter() - started)
            step_s = statistics.fmean(times_s)
            source.set_latency(limits().latency_s)
    batch_s = storage.reading_s(limits()) + beside_reading_s
    return Calibration(ratio, batch_s / step_s, limits(), batch_s, step_s)


def run_scene(
    images: ImageSet,
    storage: EmulatedStorage,
    settings: Settings,
    stretches: Sequence[Stretch],
    on_row: Callable[[SceneRow], None] = lambda row: None,
) -> Scene:
    """Train the arm that follows while the storage goes through `stretches`, at least one."""
    learner = _learner(images, settings)
    window = settings.scene_window_batches
    rows: list[SceneRow] = []
    with storage.opened(stretches[0].calibration.limits) as source:
        pipeline = _pipeline(images, settings, source)
        marks = deque([(0.0, 0.0, 0, 0)], maxlen=window + 1)  # one behind each batch
        waited_s = ends_s = 0.0
        started = time.perf_counter()
        with closing(epoch_after_epoch(pipeline)) as batches:
            for stretch in stretches:
                ratio, latency_s = stretch.calibration.ratio, stretch.calibration.limits.latency_s
                source.set_latency(latency_s)
                ends_s += stretch.seconds
                while (asked_s := time.perf_counter() - started) < ends_s:
                    batch = next(batches)
                    waited_s += time.perf_counter() - started - asked_s
                    learner.step(*batch)
                    seconds = time.perf_counter() - started
                    clock = pipeline.counts
                    marks.append((seconds, waited_s, clock.uses, clock.fresh_examples))
                    if len(marks) <= window or clock.steps % _BATCHES_A_ROW:
                        continue
                    span_s, waited, uses, fresh = (
                        now - before for before, now in zip(marks[0], marks[-1], strict=True)
                    )
                    if fresh:
                        step_s = (span_s - waited) / window
                        shares = (uses / fresh, waited / span_s)
                        rows.append(SceneRow(seconds, latency_s, ratio, *shares, step_s))
                        on_row(rows[-1])
    return Scene(window, stretches, rows)


def _learner(images: ImageSet, settings: Settings) -> Learner:
    return Learner(len(images.classes), settings.widths, settings.learning_rate, seed=0)


def _pipeline(images: ImageSet, settings: Settings, source: Source) -> stoker.Pipeline:
    return pipeline_of(
        FOLLOWING,
        source,
        images,
        batch_size=settings.batch_size,
        pool_examples=pool_examples(images, settings, FOLLOWING.most_uses),
        seed=0,
    )


def _then(values: Sequence[str]) -> str:
    return ", then ".join(values)
