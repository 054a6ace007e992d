"""Which example each step of a training uses, by stoker's own schedules and the exact clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.equal_time.clock import ExactClock, order

DICE_SIDES = 1 << 30
# A pool has 16 batches, or a tenth of little data.
_POOL_BATCHES, _LEAST_BATCHES = 16, 4
_POOL_SHARE = 0.1


class EchoArm(NamedTuple):
    """One way of echoing; the factor follows the stall."""

    place: str = "none"
    """Where the echo stands: "none"; "before" or "after" augmentation; "batch", of whole batches;
    "together", before augmentation, with all uses of an example in one batch."""
    ratio: float = 0.0
    """R, as many times as a batch takes a step to be read; 0 where it plays no role."""
    caps: tuple[int, ...] = ()
    """The most uses of an example; several: in equal parts of the training, one after another."""

    @property
    def name(self) -> str:
        """Its name in rows."""
        if self.place == "none":
            return "none"
        return f"{self.place}, R = {self.ratio:g}, cap {'-'.join(map(str, self.caps))}"


NONE = EchoArm()


@dataclass(frozen=True)
class Schedule:
    """A training of one seed: T steps of B examples."""

    items: NDArray[np.int32]
    """The examples, by number, [T, B]."""
    uses: NDArray[np.int32]
    """Which use of its fresh example each is, from 0, [T, B]."""
    dice: NDArray[np.int32]
    """What augmentation is drawn from, 0 to 2**30 - 1, [T, B]: anew for each use where the echo
    stands before it, else the same for all uses of a fresh example."""
    progress: NDArray[np.float64]
    """Share of the fresh examples that was spent after each step, [T]."""
    fresh: int
    """Fresh examples in all."""
    waits: float
    """When the last step ended, in steps' times; without echoing, of R = 1."""

    @property
    def factor(self) -> float:
        """Uses of a fresh example."""
        return self.items.size / self.fresh


class _Step(NamedTuple):
    """A step: numbers of examples, uses, numbers of fresh examples over the run, fresh, its end."""

    items: NDArray[np.int64]
    uses: NDArray[np.int64]
    instances: NDArray[np.int64]
    fresh: int
    ended: float


def schedule_of(
    arm: EchoArm, examples: int, batch_size: int, fresh_batches: int, seed: int
) -> Schedule:
    """Return the steps of an arm, up to the one that spends the last of its fresh examples.

    Raises ValueError for an arm that cannot be: several caps over more than one epoch, or copies
    together whose factor is not R.
    """
    budget = fresh_batches * batch_size
    if arm.place == "together":
        steps = _together(arm, examples, batch_size, seed)
    elif len(arm.caps) > 1:
        steps = _parts(arm, examples, batch_size, fresh_batches, seed)
    else:
        steps = _by_clock(arm, arm.caps[0] if arm.caps else 1, examples, batch_size, seed)
    taken: list[_Step] = []
    spent: list[int] = []
    for step in steps:
        taken.append(step)
        spent.append(step.fresh + (spent[-1] if spent else 0))
        if spent[-1] >= budget:
            break
    items, uses, instances = (
        np.array([step[part] for step in taken], np.int64) for part in range(3)
    )
    rng = np.random.default_rng([seed, 0xEC40])
    if arm.place in ("after", "batch"):
        lowest = int(instances.min())
        table = rng.integers(DICE_SIDES, size=int(instances.max()) - lowest + 1, dtype=np.int32)
        dice = table[instances - lowest]
    else:
        dice = rng.integers(DICE_SIDES, size=items.shape, dtype=np.int32)
    return Schedule(
        items.astype(np.int32),
        uses.astype(np.int32),
        dice,
        np.minimum(1.0, np.array(spent) / budget),
        spent[-1],
        taken[-1].ended,
    )


def _by_clock(arm: EchoArm, cap: int, examples: int, batch_size: int, seed: int) -> Iterator[_Step]:
    """Yield the steps without end, epoch after epoch."""
    holds_batches = arm.place not in ("before", "after") or cap == 1
    share = int(examples // batch_size * _POOL_SHARE)
    clock = ExactClock(
        examples,
        batch_size,
        ratio=arm.ratio or 1.0,
        max_factor=cap,
        pool_batches=max(_LEAST_BATCHES, cap, min(_POOL_BATCHES, share)),
        of_examples=not holds_batches,
        seed=seed,
    )
    each = batch_size if holds_batches else 1
    length = examples // batch_size if holds_batches else examples
    within = np.arange(each)
    for step in clock.steps():
        numbers = ((clock.epoch * length + step.ordinals)[:, None] * each + within).reshape(-1)
        epochs, places = np.divmod(numbers, length * each)
        found = np.empty(len(numbers), np.int64)
        for at in np.unique(epochs).tolist():
            chosen = epochs == at
            found[chosen] = order(examples, seed, at)[places[chosen]]
        yield _Step(found, np.repeat(step.uses, each), numbers, step.fresh, clock.supply.now)


def _parts(
    arm: EchoArm, examples: int, batch_size: int, fresh_batches: int, seed: int
) -> Iterator[_Step]:
    """Yield the steps of parts of one epoch, each with a cap and an empty pool of its own."""
    if fresh_batches * batch_size > examples:
        raise ValueError("several caps need a training of one epoch at most")
    items = order(examples, seed, 0)
    starts = [fresh_batches * n // len(arm.caps) * batch_size for n in range(len(arm.caps))]
    began = 0.0
    for cap, start, end in zip(arm.caps, starts, [*starts[1:], examples], strict=True):
        spent, ended = 0, 0.0
        for step in _by_clock(arm, cap, end - start, batch_size, seed):
            if step.instances.max() >= end - start:
                break
            numbers = step.instances + start
            spent, ended = spent + step.fresh, step.ended
            yield _Step(items[numbers], step.uses, numbers, step.fresh, began + ended)
            if spent >= end - start:
                break
        began += ended


def _together(arm: EchoArm, examples: int, batch_size: int, seed: int) -> Iterator[_Step]:
    """Yield batches of a few fresh examples, each as often as the cap says, without end."""
    (cap,) = arm.caps
    if batch_size % cap or cap != arm.ratio:
        raise ValueError("copies in one batch need a factor that is R and divides the batch")
    few, taken, number = batch_size // cap, 0, 0
    uses = np.tile(np.arange(cap), few)
    while True:
        instances = np.repeat(np.arange(taken, taken + few), cap)
        items = [
            int(order(examples, seed, n // examples)[n % examples]) for n in instances.tolist()
        ]
        taken, number = taken + few, number + 1
        yield _Step(np.array(items), uses, instances, few, number + arm.ratio - 1)
