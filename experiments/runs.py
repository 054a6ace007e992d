"""Running the arms: the same training, fed in different ways, on one clock.

A run is not interrupted by evaluations, during which storage would get ahead: weights are kept
where they are due, and evaluated when the run is over. It goes on until it has had both budgets,
fresh examples and seconds, so that arms can be compared at either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from experiments.arms import Arm, epoch_after_epoch, pipeline_of
from experiments.calibration import Calibration
from experiments.images import ImageSet
from experiments.settings import Settings
from experiments.storage import Source
from experiments.workloads import Learner


@dataclass(frozen=True)
class Evaluation:
    """A test of the network as it was during a run."""

    fresh: int
    """Fresh examples read for the batches trained on so far."""
    uses: int
    """Examples in those batches."""
    steps: int
    seconds: float
    """Time since the run began."""
    waited_s: float
    """Part of it that training waited for a batch."""
    accuracy: float
    """Share of test images classified rightly, 0 to 1."""
    grid: int | None
    """The point of the evaluation grid, in fresh examples, that was reached or just passed;
    None for the one evaluation at the end of the budget of seconds."""

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


@dataclass(frozen=True)
class Budget:
    """How long the runs of one R are: until they have had both."""

    fresh: int
    """Fresh examples."""
    seconds: float
    """Time since a run began."""


def budget_of(calibration: Calibration, settings: Settings) -> Budget:
    """Return the budget of fresh examples, and of the seconds that storage needs for some more."""
    batches = settings.budget_seconds_share * settings.budget_fresh / settings.batch_size
    # R = 1 has the same examples to read, and steps that no longer fit into the reading.
    return Budget(settings.budget_fresh, batches * max(calibration.batch_s, calibration.step_s))


def pool_examples(images: ImageSet, settings: Settings, factor: int) -> int:
    """Return the size of every pool, in examples, for echoing factors up to `factor`.

    A whole number of batches, at most `largest_pool_fraction` of the training images, but
    at least the `factor` batches that keep the uses within a batch distinct.
    """
    affordable = int(len(images.train_paths) * settings.largest_pool_fraction)
    batches = min(settings.pool_batches, affordable // settings.batch_size)
    return max(batches, factor) * settings.batch_size


def next_grid(fresh: int, settings: Settings) -> int:
    """Return the first point of the evaluation grid behind `fresh` examples."""
    start = 0
    for end, spacing in settings.grid:
        if fresh < end:
            return min(end, start + ((fresh - start) // spacing + 1) * spacing)
        start = end
    raise ValueError(f"the evaluation grid ends before {fresh} fresh examples")


def run_arm(
    arm: Arm,
    seed: int,
    images: ImageSet,
    source: Source,
    budget: Budget,
    settings: Settings,
    on_evaluation: Callable[[RunRecord], None] = lambda record: None,
) -> RunRecord:
    """Train one arm from one seed; `on_evaluation` is called when the run is over."""
    learner = Learner(len(images.classes), settings.widths, settings.learning_rate, seed)
    pipeline = pipeline_of(
        arm,
        source,
        images,
        batch_size=settings.batch_size,
        pool_examples=pool_examples(images, settings, arm.most_uses),
        seed=seed,
    )
    kept = []
    waited_s = 0.0
    grid = next_grid(0, settings)
    had_seconds = is_over = False
    started = time.perf_counter()
    with closing(epoch_after_epoch(pipeline)) as batches:
        while not is_over:
            asked = time.perf_counter()
            batch = next(batches)
            waited_s += time.perf_counter() - asked
            learner.step(*batch)
            clock = pipeline.clock
            fresh = clock.fresh_examples
            now = time.perf_counter()
            seconds = now - started
            # The last step within the budget, if the next takes as long as this one.
            ends_budget = not had_seconds and seconds + (now - asked) > budget.seconds
            if fresh >= grid or ends_budget:
                point = grid if fresh >= grid else None
                counted = (fresh, clock.uses, clock.steps, seconds, waited_s)
                kept.append((partial(Evaluation, *counted, grid=point), learner.weights()))
                had_seconds = had_seconds or ends_budget
                if point is not None:
                    grid = next_grid(fresh, settings)
            is_over = (had_seconds and fresh >= budget.fresh) or (
                seconds >= settings.longest_run * budget.seconds
            )
    record = RunRecord(arm, seed)
    for evaluation, weights in kept:
        learner.restore(weights)
        accuracy = learner.accuracy(images.test_images, images.test_labels)
        record.evaluations.append(evaluation(accuracy=accuracy))
        on_evaluation(record)
    return record
