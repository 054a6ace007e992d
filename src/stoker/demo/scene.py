"""The scene: storage slows down and recovers while one arm trains, and its factor follows.

Nothing is restarted and nobody is told: reads just begin to take longer, and later no longer do.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

from stoker.demo.arms import FOLLOWING, epoch_after_epoch, pipeline_of
from stoker.demo.calibrate import Calibration
from stoker.demo.experiment import pool_examples
from stoker.demo.images import ImageSet
from stoker.demo.settings import Settings
from stoker.demo.storage import EmulatedStorage
from stoker.demo.task import Learner

_BATCHES_A_ROW = 4


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
    """R that was set, as it was measured before."""
    factor: float
    """The echoing factor over a window of batches: uses for each fresh example."""
    waited_fraction: float
    """Share of the time of that window that training waited for a batch."""


@dataclass(frozen=True)
class Scene:
    """What happened."""

    window_batches: int
    stretches: Sequence[Stretch]
    rows: Sequence[SceneRow]

    @property
    def conclusion(self) -> str:
        """What one sees, in a sentence: medians of the second half of each stretch, when settled."""
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


def run_scene(
    images: ImageSet,
    storage: EmulatedStorage,
    stretches: Sequence[Stretch],
    settings: Settings,
    on_row: Callable[[SceneRow], None] = lambda row: None,
) -> Scene:
    """Train the arm that follows while the storage goes through `stretches`."""
    learner = Learner(len(images.classes), settings.widths, settings.learning_rate, seed=0)
    with storage.opened(stretches[0].calibration.limits) as source:
        pipeline = pipeline_of(
            FOLLOWING,
            source,
            images,
            batch_size=settings.batch_size,
            pool_examples=pool_examples(images, settings, FOLLOWING.most_uses),
            seed=0,
        )
        window = settings.scene_window_batches
        marks = deque([(0.0, 0.0, 0, 0)], maxlen=window + 1)  # one behind each batch
        rows: list[SceneRow] = []
        waited_s = ends_s = 0.0
        started = time.perf_counter()
        with closing(epoch_after_epoch(pipeline)) as batches:
            for stretch in stretches:
                latency_s = stretch.calibration.limits.latency_s
                source.set_latency(latency_s)
                ends_s += stretch.seconds
                while (asked_s := time.perf_counter() - started) < ends_s:
                    batch = next(batches)
                    waited_s += time.perf_counter() - started - asked_s
                    learner.step(*batch)
                    seconds = time.perf_counter() - started
                    clock = pipeline.clock
                    marks.append((seconds, waited_s, clock.uses, clock.fresh_examples))
                    if len(marks) <= window or clock.steps % _BATCHES_A_ROW:
                        continue
                    span_s, waited, uses, fresh = (
                        now - before for before, now in zip(marks[0], marks[-1], strict=True)
                    )
                    if fresh:
                        ratio = stretch.calibration.ratio
                        row = SceneRow(seconds, latency_s, ratio, uses / fresh, waited / span_s)
                        rows.append(row)
                        on_row(row)
    return Scene(window, stretches, rows)


def _then(values: Sequence[str]) -> str:
    return ", then ".join(values)
