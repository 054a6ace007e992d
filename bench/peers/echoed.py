"""A loader's batches, used more than once: by stoker and by MONAI, on one loader in one process.

``monai.py`` starts ``python -P echoed.py`` in MONAI's environment, stoker on its path, and sends
orders on stdin; answers go to stdout, all in JSON lines. Where MONAI is not installed, orders
without it are answered.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import stoker
from experiments.workloads import Learner, augment

Uses = Iterator[tuple[Any, Any, int]]
"""Images, labels, and the fresh examples that were handed out so far."""


@dataclass(frozen=True)
class Reached:
    """Where training reached its target."""

    fresh: int
    """Fresh examples."""
    steps: int
    seconds: float
    waited_s: float
    """Part of them that training waited for a batch."""
    accuracy: float


def train(
    uses: Uses,
    learner: Learner,
    test: tuple[Any, Any],
    target: float,
    next_point: Callable[[int], int],
    over: Callable[[int, float], bool],
) -> Reached | None:
    """Train; return the first point of the grid that reached the target, None if none did.

    Weights are kept at each point and evaluated when training is over, or the upstream would get
    ahead meanwhile.

    Args:
        uses: what is trained on.
        learner: a new one.
        test: images and labels.
        target: the accuracy, 0 to 1.
        next_point: given fresh examples, the next point at which to evaluate.
        over: given fresh examples and seconds, whether training ends.
    """
    kept = []
    waited_s = 0.0
    point = next_point(0)
    started = asked = time.perf_counter()
    for steps, (images, labels, fresh) in enumerate(uses, 1):
        waited_s += time.perf_counter() - asked
        learner.step(images, labels)
        asked = time.perf_counter()
        seconds = asked - started
        if fresh >= point:
            kept.append((partial(Reached, fresh, steps, seconds, waited_s), learner.weights()))
            point = next_point(fresh)
        if over(fresh, seconds):
            break
    for reached, weights in kept:
        learner.restore(weights)
        accuracy = learner.accuracy(*test)
        if accuracy >= target:
            return reached(accuracy)
    return None


class Rows:
    """Arrays behind a latency, one row a call."""

    def __init__(self, images: Any, labels: Any, latency_s: float) -> None:
        self._images, self._labels = images, labels
        self._latency_s = latency_s

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        time.sleep(self._latency_s)
        return self._images[index], self._labels[index]


def stacked(rows: list[tuple[Any, int]]) -> tuple[Any, Any]:
    """Make a batch of tensors."""
    images, labels = zip(*rows, strict=True)
    return torch.from_numpy(np.stack(images)), torch.from_numpy(np.array(labels))


def stacked_augmented(rows: list[tuple[Any, int]]) -> tuple[Any, Any]:
    """Make a batch, its images augmented."""
    images, labels = stacked(rows)
    rng = np.random.default_rng(int(torch.randint(1 << 62, ())))
    return torch.from_numpy(augment(images.numpy(), rng)), labels


def uses(
    maker: str, factor: int | str, data: Any, *, batch: int, pool: int, anew: bool, **settings: Any
) -> Uses:
    """Iterate over a loader, each batch used so often: by "torch" (once), "monai" or "stoker".

    ``anew``: whether uses are augmented behind the echo, each anew.
    """
    settings = {"batch_size": batch, "shuffle": True, "drop_last": True, **settings}
    if maker == "stoker":
        pipeline = stoker.echo(DataLoader(data, **settings), factor, pool=pool, seed=0)
        if anew:
            pipeline = pipeline.random_map(_augmented, on=0)
        with iter(pipeline) as batches:
            for images, labels in batches:
                yield images, labels, pipeline.clock.fresh_examples
        return
    repeats = int(factor)
    loader: Iterable[Any]
    if maker == "monai":
        from monai.data import ThreadDataLoader

        loader = ThreadDataLoader(data, repeats=repeats, **settings)
    else:
        loader = DataLoader(data, **settings)
    for number, (images, labels) in enumerate(loader):
        yield images, labels, (number // repeats + 1) * batch


def _augmented(images: Any, rng: np.random.Generator) -> Any:
    return torch.from_numpy(augment(images.numpy(), rng))


@dataclass(frozen=True)
class Rate:
    """Batches per second, handed out and fresh."""

    batches: float
    fresh: float


def rate(
    maker: str,
    factor: int | str,
    *,
    batches: int,
    batch: int,
    pool: int,
    workers: int,
    latency_s: float,
    step_s: float,
) -> Rate:
    """Use so many fresh batches; rates are of the time after the pool's first filling.

    They end with the last fresh batch, for a pool would drain then.
    """
    rows = np.zeros((batches * batch, 32, 32, 3), np.uint8)
    data = Rows(rows, np.arange(len(rows)), latency_s)
    times, came = [], []
    settings = {"num_workers": workers, "collate_fn": stacked}
    for _, _, fresh in uses(maker, factor, data, batch=batch, pool=pool, anew=False, **settings):
        times.append(time.perf_counter())
        came.append(fresh // batch)
        if step_s:
            time.sleep(step_s)
    first, last = (next(i for i, n in enumerate(came) if n >= m) for m in (pool + 1, batches))
    elapsed_s = times[last] - times[first]
    return Rate((last - first) / elapsed_s, (batches - pool - 1) / elapsed_s)


def alone(steps: int, step_s: float) -> Rate:
    """Return the rate of the step on batches that are there."""
    began = time.perf_counter()
    for _ in range(steps):
        time.sleep(step_s)
    each = steps / (time.perf_counter() - began)
    return Rate(each, each)


class Task:
    """The network of experiments/, its images behind a loader.

    Args:
        folder: where ``images.npy``, ``labels.npy``, ``test_images.npy``, ``test_labels.npy`` are.
        classes, widths, learning_rate: of the network.
        batch: examples in a batch.
        workers: processes of the loader.
    """

    def __init__(
        self,
        folder: str,
        *,
        classes: int,
        widths: list[int],
        learning_rate: float,
        batch: int,
        workers: int,
    ) -> None:
        names = ("images", "labels", "test_images", "test_labels")
        found = [np.load(Path(folder, f"{name}.npy")) for name in names]
        self._train, self._test = (found[0], found[1]), (found[2], found[3])
        self._learner = partial(Learner, classes, tuple(widths), learning_rate)
        self._batch, self._workers = batch, workers

    def _uses(self, maker: str, factor: int | str, latency_s: float, **how: Any) -> Uses:
        data = Rows(*self._train, latency_s)
        collate = stacked if how["anew"] else stacked_augmented
        return uses(
            maker,
            factor,
            data,
            batch=self._batch,
            num_workers=self._workers,
            collate_fn=collate,
            **how,
        )

    def times(self, latency_s: float, steps: int) -> dict[str, float]:
        """Return the seconds of a fresh batch, and of a step, each alone."""
        found = {}
        learner = self._learner(seed=0)
        ready = (torch.from_numpy(a[: self._batch]) for a in self._train)
        images, labels = (tensor.numpy() for tensor in ready)
        fresh = self._uses("torch", 1, latency_s, pool=0, anew=False)
        for name, do, count in (
            ("batch_s", lambda: next(fresh), max(4, steps // 8)),
            ("step_s", lambda: learner.step(images, labels), steps),
        ):
            for _ in range(count // 2):
                do()
            began = time.perf_counter()
            for _ in range(count):
                do()
            found[name] = (time.perf_counter() - began) / count
        return found

    def train(
        self,
        maker: str,
        factor: int | str,
        *,
        anew: bool,
        pool: int,
        seed: int,
        latency_s: float,
        target: float,
        spacing: int,
        budget: int,
    ) -> dict[str, float] | None:
        """Train on at most so many fresh examples; return where the target was reached."""
        torch.manual_seed(seed)  # the order of the data, and augmentation in the loader
        fed = self._uses(maker, factor, latency_s, pool=pool, anew=anew)
        reached = train(
            ((images.numpy(), labels.numpy(), fresh) for images, labels, fresh in fed),
            self._learner(seed=seed),
            self._test,
            target,
            lambda fresh: (fresh // spacing + 1) * spacing,
            lambda fresh, seconds: fresh >= budget,
        )
        return None if reached is None else asdict(reached)


def main() -> None:
    torch.set_num_threads(1)  # a second core is left for loading
    out, sys.stdout = sys.stdout, sys.stderr  # what is printed is no answer
    task = Task(sys.argv[1], **json.loads(sys.argv[2]))
    calls: dict[str, Callable[..., Any]] = {
        "versions": versions,
        "rate": lambda **order: asdict(rate(**order)),
        "alone": lambda **order: asdict(alone(**order)),
        "times": task.times,
        "train": task.train,
    }
    for line in sys.stdin:
        call, order = json.loads(line)
        print(json.dumps(calls[call](**order)), file=out, flush=True)


def versions() -> dict[str, str]:
    """Return what is installed here."""
    found = {}
    for name in ("monai", "numpy", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
