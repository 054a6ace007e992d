"""What comes of it: the same stream as in a timing, trained on as fast as this machine can."""

from __future__ import annotations

import math
import time
from contextlib import closing
from typing import Any

import torch

from experiments.arms import Arm, epoch_after_epoch
from experiments.suite.feeds import Counts, feed
from experiments.suite.rows import WARM_UP
from experiments.suite.workload import Part, Workload

_DIVERGED = 1e3
_FINAL_TESTS = 3
_PROBED_STEPS = 20


def schedule(progress: float, warm_up: float = WARM_UP) -> float:
    """Return the learning rate as a share of its peak, after this share of the fresh examples.

    Warm-up, then half a cosine down to 0: by fresh examples, so that no echo changes it. Behind 1,
    where a schedule by steps comes to, the cosine goes up and down again, as torch's does.
    """
    return min(1.0, progress / warm_up) * (1 + math.cos(math.pi * progress)) / 2


def trained_run(
    workload: Workload,
    arm: Arm,
    seed: int,
    learning_rate: float,
    part: Part = "test",
    replay: dict[str, Any] | None = None,
    warm_up: float = WARM_UP,
) -> dict[str, Any]:
    """Train through the budget; return what tests of the network found.

    `points` has a row at each point of the grid: steps, fresh examples, uses, loss, metric. For a
    choice by the validation part the last few are enough. A loss that is not finite counts as 1000.
    """
    learner = _Learner(workload, seed)
    optimizer = workload.optimizer(learner.network, learning_rate)
    pipeline = feed(workload, arm, seed)
    pipeline = pipeline if replay is None else pipeline.replay(replay)
    counts = Counts(workload.recipe)
    steps = workload.recipe.budget_fresh / workload.recipe.batch_size
    tested_from = 0 if part == "test" else workload.recipe.evaluations - _FINAL_TESTS
    passed = 0
    points: list[list[float]] = []
    with closing(epoch_after_epoch(pipeline)) as batches:
        while not counts.is_over:
            batch = next(batches)
            is_point = counts.add_of(pipeline)
            for group in optimizer.param_groups:
                progress = (
                    counts.latest[0] / steps if workload.variant.by_steps else counts.progress
                )
                group["lr"] = learning_rate * schedule(progress, warm_up)
            optimizer.zero_grad(set_to_none=True)
            workload.loss(learner.network, batch).backward()
            optimizer.step()
            passed += is_point
            if is_point and (passed > tested_from or counts.is_over):
                points.append([*counts.latest, *learner.score(part)])
    return {"points": points, "digest": counts.digest}


def probe(workload: Workload) -> dict[str, float]:
    """Return the seconds of a training step and of a test, for an estimate."""
    learner = _Learner(workload, 0)
    optimizer = workload.optimizer(learner.network, workload.recipe.learning_rates[0])
    with closing(epoch_after_epoch(feed(workload, Arm("none"), 0))) as batches:
        for step in range(_PROBED_STEPS):
            if step == _PROBED_STEPS // 4:
                started = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            workload.loss(learner.network, next(batches)).backward()
            optimizer.step()
        stepped = time.perf_counter()
    learner.score("test")
    return {
        "step_s": (stepped - started) / (_PROBED_STEPS - _PROBED_STEPS // 4),
        "test_s": time.perf_counter() - stepped,
    }


class _Learner:
    """A network; the same seed gives the same initial weights."""

    def __init__(self, workload: Workload, seed: int) -> None:
        torch.manual_seed(seed)
        self._workload = workload
        self.network = workload.network()

    def score(self, part: Part) -> tuple[float, float]:
        """Return loss and metric, rounded."""
        self.network.eval()
        with torch.inference_mode():
            loss, metric = self._workload.score(self.network, part)
        self.network.train()
        if not math.isfinite(loss):
            return _DIVERGED, round(metric, 4) if math.isfinite(metric) else 0.0
        return round(min(loss, _DIVERGED), 5), round(metric, 4)
