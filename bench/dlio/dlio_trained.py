"""A training inside DLIO: loop, clock and reader are DLIO's, network and examples the study's.

DLIO reads sample n and drops it, as always; the training then takes example n of its own data. It
takes the place of the sleep that DLIO simulates a step with. ``dlio_training.py`` sets it up.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dlio_benchmark.data_loader.torch_data_loader import TorchDataLoader
from dlio_benchmark.framework.torch_framework import TorchFramework
from dlio_stoker import Samples, Threads  # type: ignore[import-not-found]

import stoker
from experiments.equal_time import stacks
from experiments.equal_time.schedules import DICE_SIDES
from experiments.equal_time.tasks import Fashion
from experiments.equal_time.training import rate_at

PLAN: dict[str, Any] = json.loads(os.environ["STOKER_TRAINING"])


class Training:
    """One training, from the first request of a batch on; it ends the process when time is over."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        torch.set_num_threads(1)
        self._task = Fashion(Path(PLAN["folder"]), "cpu", PLAN["examples"], augments=True)
        self._weights = stacks.begin(self._task.shapes, [PLAN["seed"]], 1, "cpu")
        self._normals = self._task.normals(1)
        self._optimizer = self._task.optimizer(self._weights)
        self._rng = np.random.default_rng([PLAN["seed"], 1])
        self._steps, self._trained_s = 0, 0.0

    def step(self, items: Any) -> None:
        """Train on examples int64 [B]."""
        now_s = time.perf_counter()
        progress = (now_s - self.began_s) / PLAN["training_s"]
        if progress >= 1:
            self._end()
        dice = torch.from_numpy(self._rng.integers(DICE_SIDES, size=(1, len(items))))
        batch = self._task.batch("train", torch.as_tensor(items)[None], dice)
        weights = self._weights.requires_grad_(True)
        loss = self._task.losses(weights, batch, self._normals, True).loss.mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        self._weights = weights.detach()
        rate = PLAN["learning_rate"] * rate_at(progress, PLAN["warm_up"])
        self._optimizer.step(self._weights, gradient, torch.tensor([[rate]]))
        self._steps += 1
        self._trained_s += time.perf_counter() - now_s

    def _end(self) -> None:
        found: dict[str, Any] = {"steps": self._steps}
        found["trained_fraction"] = self._trained_s / PLAN["training_s"]
        for part in ("validation", "test"):
            (loss,), (accuracy,) = self._task.score(self._weights, self._normals, part)  # type: ignore[arg-type]
            found |= {part: loss, f"{part}_accuracy": accuracy}
        Path(PLAN["out"]).write_text(json.dumps(found))
        sys.exit()


class Loader(TorchDataLoader):  # type: ignore[misc]
    """DLIO's DataLoader; its samples stand for the examples in an order of their own each epoch."""

    def next(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        if not hasattr(self, "_rng"):
            self._training, self._rng = Training(), np.random.default_rng(PLAN["seed"])
            TorchFramework.compute = lambda framework, items, *_: self._training.step(items)
        order = self._rng.permutation(PLAN["examples"])
        for number, _ in enumerate(super().next()):
            yield order[number * self.batch_size : (number + 1) * self.batch_size]


@stoker.thread_safe
class Numbered(Samples):
    """Samples with their numbers."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return super().__getitem__(index), index


class Stoker(Threads):
    """stoker's threads prepare."""

    samples, seed = Numbered, PLAN["seed"]

    def next(self) -> Iterator[Any]:
        """Yield as many batches as DLIO takes in an epoch; an epoch of stoker's may be longer."""
        if not hasattr(self, "_going"):
            training = Training()
            TorchFramework.compute = lambda framework, batch, *_: training.step(batch[1])
            self._going = itertools.chain.from_iterable(itertools.repeat(self._batches))
        yield from itertools.islice(self._going, self._args.training_steps)


class Processes(Stoker):
    """stoker's processes prepare."""

    kind = "process"


class Echoed(Stoker):
    """Threads prepare, and examples are used again, cropped anew, while training would wait."""

    def chain(self, samples: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
        """Return the stages before the batch."""
        return samples.echo("auto")


class EchoedProcesses(Echoed):
    """The same by processes."""

    kind = "process"
