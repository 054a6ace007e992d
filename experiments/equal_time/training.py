"""Training a stack: several settings and seeds side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from experiments.equal_time import stacks
from experiments.equal_time.plan import TUNING_SEED, Cell, Settings
from experiments.equal_time.rows import best_setting, joined
from experiments.equal_time.schedules import Schedule, schedule_of
from experiments.equal_time.tasks import Task

BINS = 10
"""Parts of a training in which losses are kept by use."""
USES = 4
"""Uses whose losses are kept; later ones count as the last of these."""
_LOOKED_AT = 50
_DIVERGED = 1e3


class OutOfTimeError(Exception):
    """A training would not end before the deadline."""


def tune_and_train(
    task: Task, cell: Cell, seeds: Sequence[int], deadline: float = math.inf
) -> dict[str, Any]:
    """Choose a cell's settings by some seeds, and train the others with them; see `train`."""

    def trained(some: list[int], settings: list[Settings]) -> dict[str, Any]:
        schedules = [
            schedule_of(cell.arm, task.examples, task.batch_size, cell.fresh_batches, seed)
            for seed in some
        ]
        return train(task, some, schedules, settings, deadline)

    tuned = trained([seed for seed in seeds if seed >= TUNING_SEED], cell.settings)
    best = best_setting(tuned["validation"])
    counted = trained([seed for seed in seeds if seed < TUNING_SEED], [cell.settings[best]])
    return joined(counted, tuned, best)


def train(
    task: Task,
    seeds: Sequence[int],
    schedules: Sequence[Schedule],
    settings: Sequence[Settings],
    deadline: float = math.inf,
) -> dict[str, Any]:
    """Train every seed with every setting; return what tests found at the end.

    Lists are by seed, then by setting. A training that is over before others of its stack waits for
    them: nothing of it changes, and none of its losses count. Losses by use are means over a part
    of the training, by seed, setting, part and use; None where there was no such use.

    Args:
        deadline: by `time.monotonic`.

    Raises OutOfTimeError when it cannot be met: at once, where the first steps say so.
    """
    device, per_seed = task.device, len(settings)
    stack = len(seeds) * per_seed
    steps = max(len(each.progress) for each in schedules)
    items, dice, places = (
        torch.from_numpy(_padded([part(each) for each in schedules], steps)).to(device)
        for part in (lambda s: s.items, lambda s: s.dice, _use_place)
    )
    rates = torch.from_numpy(_rates(schedules, settings, steps)).to(device)
    weights = stacks.begin(task.shapes, seeds, per_seed, device)
    normals, optimizer = task.normals(stack), task.optimizer(weights)
    sums = torch.zeros(stack, BINS * USES, device=device)
    counts = torch.zeros(stack, BINS * USES, device=device)
    lengths = torch.tensor([len(each.progress) for each in schedules], device=device)
    lengths = lengths.repeat_interleave(per_seed)
    shortest = int(lengths.min())
    none = torch.zeros((), device=device)
    one = torch.ones((), device=device)
    began = time.monotonic()
    for step in range(steps):
        if step and step % _LOOKED_AT == 0:
            _look(task, began, step, steps, deadline)
        batch = task.batch("train", items[step].long(), dice[step].long())
        batch = tuple(x.repeat_interleave(per_seed, dim=0) for x in batch)
        goes_on = lengths[:, None] > step
        held = [normal.running.clone() for normal in normals] if step >= shortest else []
        weights.requires_grad_(True)
        losses = task.losses(weights, batch, normals, True).loss
        (gradient,) = torch.autograd.grad(losses.mean(1).sum(), weights)
        weights = weights.detach()
        optimizer.step(weights, gradient, rates[step])
        for normal, before in zip(normals, held, strict=False):
            normal.running.copy_(torch.where(goes_on, normal.running, before))
        place = places[step].long().repeat_interleave(per_seed, dim=0)
        sums.scatter_add_(1, place, torch.where(goes_on, losses.detach(), none))
        counts.scatter_add_(1, place, torch.where(goes_on, one, none).expand(place.shape))
    found: dict[str, Any] = {}
    for part in ("validation", "test"):
        loss, metric = task.score(weights, normals, part)
        found[part] = _by_seed([_bounded(each) for each in loss], per_seed)
        found[f"{part}_metric"] = _by_seed([_bounded(each) for each in metric], per_seed)
    means = (sums / counts).view(stack, BINS, USES).tolist()
    found["by_use"] = _by_seed(
        [[[_bounded(x) if x == x else None for x in uses] for uses in each] for each in means],
        per_seed,
    )
    found["steps"] = [len(each.progress) for each in schedules]
    found["fresh"] = [each.fresh for each in schedules]
    found["waits"] = [round(each.waits, 3) for each in schedules]
    found["took_s"] = round(time.monotonic() - began, 2)
    return found


def rate_at(progress: float, warm_up: float) -> float:
    """Return the learning rate as a share of its peak, after this share of the fresh examples.

    Warm-up, then half a cosine down to 0: by fresh examples, so that no echo changes it.
    """
    return min(1.0, progress / warm_up) * (1 + math.cos(math.pi * progress)) / 2


def _look(task: Task, began: float, step: int, steps: int, deadline: float) -> None:
    """Give up what cannot end in time."""
    if step == 2 * _LOOKED_AT and task.device != "cpu":
        torch.cuda.synchronize()
    now = time.monotonic()
    needed = (now - began) / step * (steps - step) if step >= 2 * _LOOKED_AT else 0.0
    if now + needed > deadline:
        raise OutOfTimeError(f"step {step} of {steps}, {needed:.0f} s to go")


def _rates(
    schedules: Sequence[Schedule], settings: Sequence[Settings], steps: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the learning rates of each step, float32 [T, M, 1]; 0 behind a training's end."""
    rates = np.zeros((steps, len(schedules), len(settings)), np.float32)
    for number, each in enumerate(schedules):
        for place, (peak, warm_up) in enumerate(settings):
            shares = [peak * rate_at(progress, warm_up) for progress in each.progress.tolist()]
            rates[: len(shares), number, place] = shares
    return rates.reshape(steps, -1, 1)


def _padded(arrays: Sequence[Any], steps: int) -> Any:
    """Return arrays [T, B] as one [T, seeds, B], each with its last row repeated to the end."""
    rows = [array[np.minimum(np.arange(steps), len(array) - 1)] for array in arrays]
    return np.ascontiguousarray(np.stack(rows, 1))


def _use_place(schedule: Schedule) -> Any:
    """Return where the loss of each use is counted."""
    part = np.minimum(BINS - 1, (schedule.progress * BINS).astype(np.int32))
    return (part[:, None] * USES + np.minimum(schedule.uses, USES - 1)).astype(np.int32)


def _bounded(value: float) -> float:
    if not math.isfinite(value):
        return _DIVERGED
    return round(max(-_DIVERGED, min(value, _DIVERGED)), 4)


def _by_seed(values: list[Any], per_seed: int) -> list[list[Any]]:
    return [values[at : at + per_seed] for at in range(0, len(values), per_seed)]
