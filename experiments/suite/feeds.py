"""How an arm's training is fed: the same pipeline, from storage that sleeps or that does not."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import torch

import stoker
from experiments.arms import Arm, echoed
from experiments.grids import next_point
from experiments.suite.workload import Examples, Recipe, Workload

READERS = 8
"""Threads that read: as many reads sleep at a time."""
_POOL_BATCHES = 16
_POOL_SHARE = 0.1
_LOADER_SEED = 1 << 20


def feed(
    workload: Workload,
    arm: Arm,
    seed: int,
    *,
    read_s: float = 0.0,
    took_s: list[float] | None = None,
) -> stoker.Pipeline:
    """Build what an arm trains on: the same stream for the same seed, however long a read sleeps.

    Args:
        read_s: seconds that a batch takes to be read.
        took_s: gets the seconds that each example of a pipeline did take to be read.
    """
    recipe = workload.recipe
    pooled = pool_batches(workload, arm)
    if arm.place == "loader":
        return stoker.echo(
            _loader(workload, seed, read_s),
            arm.factor,
            pool=pooled,
            transform=workload.transform(arm.transform_name) if arm.transform else None,
            repeats_only=arm.repeats_only,
            seed=seed,
        )
    sleeping = _Sleeping(workload.train, read_s * READERS / recipe.batch_size, took_s)
    examples = stoker.from_dataset(sleeping, seed=seed).workers(READERS if read_s else 1)
    return echoed(
        arm,
        examples.shuffle().map(workload.prepare),
        augment=lambda p: p.random_map(workload.augment),
        batch_size=recipe.batch_size,
        pool_batches=pooled,
    )


def pool_batches(workload: Workload, arm: Arm) -> int:
    """Return what a pool holds: the default, or a tenth of little data; never less than works."""
    if workload.variant.pool_batches is not None:
        return max(2, arm.most_uses, workload.variant.pool_batches)
    batches = len(workload.train) // workload.recipe.batch_size
    return max(2, arm.most_uses, min(_POOL_BATCHES, int(batches * _POOL_SHARE)))


def _loader(workload: Workload, seed: int, read_s: float) -> Any:
    """Return a DataLoader without workers: the echo reads it in a thread of its own."""
    batch_size = workload.recipe.batch_size
    examples: Any = _Augmented(workload, seed, read_s / batch_size)
    return torch.utils.data.DataLoader(
        examples,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(_LOADER_SEED + seed),
    )


class _Sleeping:
    """Examples behind a latency for every read; reads of several threads overlap."""

    def __init__(
        self, examples: Examples, latency_s: float, took_s: list[float] | None = None
    ) -> None:
        self._examples = examples
        self._latency_s = latency_s
        self._took_s = [] if took_s is None else took_s

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        if self._latency_s:
            asked = time.perf_counter()
            time.sleep(self._latency_s)
            self._took_s.append(time.perf_counter() - asked)
        return self._examples[index]


class _Augmented:
    """A dataset as a loader has it: prepared and augmented, by one thread in its order."""

    def __init__(self, workload: Workload, seed: int, latency_s: float) -> None:
        self._workload = workload
        self._examples = _Sleeping(workload.train, latency_s)
        self._rng = np.random.default_rng([_LOADER_SEED, seed])

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        prepared = self._workload.prepare(self._examples[index])
        return self._workload.augment(prepared, self._rng)


class Counts:
    """Steps, fresh examples and uses of a run: a run that repeats another has the same."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._grid = ((recipe.budget_fresh, recipe.spacing_fresh),)
        self._point = next_point(0, self._grid)
        self._digest = hashlib.sha256()
        self.latest = (0, 0, 0)
        """Steps, fresh examples, uses."""

    def add(self, steps: int, fresh_examples: int, uses: int) -> bool:
        """Count a batch, all numbers with it; return whether it passed a point of the grid."""
        self.latest = (steps, fresh_examples, uses)
        self._digest.update(np.asarray(self.latest, np.int64).tobytes())
        if fresh_examples < self._point:
            return False
        if not self.is_over:
            self._point = next_point(fresh_examples, self._grid)
        return True

    def add_of(self, pipeline: stoker.Pipeline) -> bool:
        """Count the batch that a pipeline has just handed out, as `add` does."""
        clock = pipeline.clock
        return self.add(clock.steps, clock.fresh_examples, clock.uses)

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self.latest[1] >= self._recipe.budget_fresh

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, 0 to 1."""
        return min(1.0, self.latest[1] / self._recipe.budget_fresh)

    @property
    def digest(self) -> str:
        """What stands for the counts after every step."""
        return self._digest.hexdigest()[:16]
