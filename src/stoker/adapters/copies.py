"""Value of copies: how much lower the loss of repeated examples is than that of fresh ones.

The loss of an example is lower if the model has just been trained on it. The gap measures how well
the model remembers the example, and grows if copies are memorised. It does not measure the value of
a copy for unseen data; a validation set does.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.pipeline import Pipeline

# Losses of consecutive steps are correlated; means of this many blocks of steps hardly are.
_BLOCKS = 16
# Student's t for 95 %, 15 degrees of freedom: one less than ``_BLOCKS``.
_STUDENT = 2.131
# Steps whose losses may stay on an accelerator: reading one at once would make the loop wait for
# its step.
_PENDING = 64


@dataclass(frozen=True)
class Gap:
    """The gap between the losses of first and later uses, in one epoch."""

    epoch: int
    use: int
    """The number of the use: 2 is the first copy."""
    steps: int
    """Steps that had such uses, and were compared."""
    fresh_loss: float
    """Mean loss of first uses in these steps; where a step has none, between those around it."""
    gap: float
    """``fresh_loss`` less the mean loss of these uses."""
    low: float
    high: float
    """The gap's 95 % confidence interval; infinite for less than 32 steps."""

    def __str__(self) -> str:
        interval = f"{self.low:.3f} to {self.high:.3f}" if math.isfinite(self.low) else "too few"
        return (
            f"epoch {self.epoch}, use {self.use}: {self.fresh_loss:.3f} fresh, lower by "
            f"{self.gap:.3f} ({interval}), {self.steps:,} steps"
        )


class CopyValue:
    """Follows the losses of first and later uses; see ``value_of_copies``."""

    def __init__(self, train: Pipeline[Any]) -> None:
        self._train = train
        self._pending: list[tuple[int, NDArray[np.int64], Any]] = []
        self._step = 0
        self._fresh: tuple[int, float] | None = None  # the last step with first uses, their loss
        self._between: list[tuple[int, int, dict[int, float]]] = []  # steps since, without any
        # By epoch and use: a difference for each step, and the loss of first uses.
        self._gaps: dict[tuple[int, int], array[float]] = defaultdict(lambda: array("d"))
        self._losses: dict[tuple[int, int], array[float]] = defaultdict(lambda: array("d"))

    def observe(self, losses: Any) -> None:
        """Record the losses of the batch that the pipeline has just handed out.

        Args:
            losses: one for each example, ``[n]``, an array or a tensor (``reduction="none"``); if
                whole batches are echoed, their mean is enough. Only every 64th call waits for an
                accelerator.

        Raises ValueError if the numbers of losses and examples differ.
        """
        number = self._train.last.number
        losses = losses.detach() if pytree.is_tensor(losses) else np.asarray(losses)
        if losses.ndim == 0 and len(np.unique(number)) > 1:
            raise ValueError(
                "the batch has first and later uses: give observe() a loss for each example "
                '(reduction="none")'
            )
        if losses.ndim and tuple(losses.shape) != number.shape:
            raise ValueError(
                f"observe() takes a loss for each of the {len(number)} examples of the batch, not "
                f"{list(losses.shape)}"
            )
        self._pending.append((self._train.epoch, number, losses))
        if len(self._pending) == _PENDING:
            self._settle()

    def gaps(self) -> list[Gap]:
        """Return the gap of each use in each epoch so far."""
        self._settle()
        return [self._gap(*key) for key in sorted(self._gaps)]

    def __str__(self) -> str:
        """Return a line for each epoch and use."""
        return "\n".join(map(str, self.gaps())) or "no copies have been compared yet"

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for epoch, number, losses in pending:
            if pytree.is_tensor(losses):
                losses = losses.float().cpu().numpy()
            losses = np.broadcast_to(losses.astype(np.float64), number.shape)
            means = {int(use): float(losses[number == use].mean()) for use in np.unique(number)}
            self._add(epoch, means)

    def _add(self, epoch: int, means: dict[int, float]) -> None:
        self._step += 1
        fresh = means.pop(1, None)
        if fresh is None:
            if self._fresh is not None:
                self._between.append((self._step, epoch, means))
            return
        if self._fresh is not None:
            then, before = self._fresh
            for step, of_epoch, uses in self._between:
                share = (step - then) / (self._step - then)
                self._compare(of_epoch, before + (fresh - before) * share, uses)
        self._between.clear()
        self._fresh = self._step, fresh
        self._compare(epoch, fresh, means)

    def _compare(self, epoch: int, fresh: float, means: dict[int, float]) -> None:
        for use, mean in means.items():
            if math.isfinite(fresh - mean):
                self._gaps[epoch, use].append(fresh - mean)
                self._losses[epoch, use].append(fresh)

    def _gap(self, epoch: int, use: int) -> Gap:
        gaps = np.array(self._gaps[epoch, use])
        gap, reach = float(gaps.mean()), math.inf
        if len(gaps) >= 2 * _BLOCKS:
            blocks = [part.mean() for part in np.array_split(gaps, _BLOCKS)]
            reach = _STUDENT * float(np.std(blocks, ddof=1)) / math.sqrt(_BLOCKS)
        fresh = float(np.mean(self._losses[epoch, use]))
        return Gap(epoch, use, len(gaps), fresh, gap, gap - reach, gap + reach)


def value_of_copies(train: Pipeline[Any]) -> CopyValue:
    """Compare the losses of first and later uses, while training.

    ::

        copies = stoker.value_of_copies(train)
        for images, labels in train:
            losses = cross_entropy(model(images), labels, reduction="none")
            copies.observe(losses)
            losses.mean().backward()
            ...
        print(copies)

    A gap that grows from epoch to epoch shows that copies are being memorised: lower
    ``max_factor``, or augment after the echo.

    Raises TypeError when ``train`` is not a pipeline.
    """
    if not isinstance(train, Pipeline):
        raise TypeError(f"value_of_copies() takes a stoker.Pipeline, not {type(train).__name__}")
    return CopyValue(train)
