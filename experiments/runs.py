"""Running the arms: the same training, fed in different ways, on one clock.

The clock, and storage with it, stands still while the network is evaluated: evaluations cost an arm
no time, and storage gets nothing ahead of the training meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from experiments.arms import Arm, epoch_after_epoch, pipeline_of
from experiments.grids import next_point
from experiments.images import ImageSet
from experiments.settings import Settings
from experiments.storage import Source
from experiments.workloads import Learner


@dataclass(frozen=True)
class Evaluation:
    """A test of the network during a run."""

    grid: int
    """The point of the evaluation grid, in fresh examples, that was reached or just passed."""
    fresh: int
    """Fresh examples read for the batches trained on so far."""
    uses: int
    """Examples in those batches."""
    steps: int
    seconds: float
    """Time since the run began, that of evaluations left out."""
    waited_s: float
    """Part of it that training waited for a batch."""
    accuracy: float
    """Share of test images classified rightly, 0 to 1."""

    @property
    def factor(self) -> float:
        """The echoing factor that was realised: mean uses of a fresh example so far."""
        return self.uses / self.fresh


@dataclass
class RunRecord:
    """One arm, one seed."""

    arm: Arm
    seed: int
    evaluations: list[Evaluation] = field(default_factory=list)


def pool_examples(images: ImageSet, settings: Settings, factor: int) -> int:
    """Return the size of every pool, in examples, for echoing factors up to `factor`.

    A whole number of batches, at most `largest_pool_fraction` of the training images, but
    at least the `factor` batches that keep the uses within a batch distinct.
    """
    affordable = int(len(images.train_paths) * settings.largest_pool_fraction)
    batches = min(settings.pool_batches, affordable // settings.batch_size)
    return max(batches, factor) * settings.batch_size


def run_arm(
    arm: Arm,
    seed: int,
    images: ImageSet,
    source: Source,
    settings: Settings,
    is_over: Callable[[Evaluation], bool],
    on_evaluation: Callable[[RunRecord], None] = lambda record: None,
) -> RunRecord:
    """Train one arm from one seed, until `is_over` says so of an evaluation.

    `on_evaluation` is called after each, while the clock stands still.
    """
    learner = Learner(len(images.classes), settings.widths, settings.learning_rate, seed)
    pipeline = pipeline_of(
        arm,
        source,
        images,
        batch_size=settings.batch_size,
        pool_examples=pool_examples(images, settings, arm.most_uses),
        seed=seed,
    )
    record = RunRecord(arm, seed)
    clock = source.clock
    waited_s = 0.0
    point = next_point(0, settings.grid)
    started = clock.now()
    with closing(epoch_after_epoch(pipeline)) as batches:
        while True:
            asked = clock.now()
            batch = next(batches)
            waited_s += clock.now() - asked
            learner.step(*batch)
            fresh = pipeline.counts.fresh_examples
            if fresh < point:
                continue
            with clock.stopped():
                evaluation = Evaluation(
                    grid=point,
                    fresh=fresh,
                    uses=pipeline.counts.uses,
                    steps=pipeline.counts.steps,
                    seconds=clock.now() - started,
                    waited_s=waited_s,
                    accuracy=learner.accuracy(images.test_images, images.test_labels),
                )
                record.evaluations.append(evaluation)
                on_evaluation(record)
            if is_over(evaluation):
                return record
            point = next_point(fresh, settings.grid)
