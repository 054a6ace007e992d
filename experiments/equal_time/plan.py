"""The cells, those that tell most first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from experiments.equal_time.schedules import NONE, EchoArm
from experiments.equal_time.tasks import Task, task_of

SEEDS = 5
TUNING_SEEDS = 2
TUNING_SEED = 1_000
"""Settings are chosen on seeds from here on, results come from seeds from 0 on."""
WARM_UPS = (0.05, 0.2)
"""Shares of the fresh examples over which the rate rises."""


class Settings(NamedTuple):
    """What is chosen for each arm."""

    learning_rate: float
    warm_up: float


WIDE = (
    EchoArm("before", 8, (8,)),
    EchoArm("before", 8, (4,)),
    EchoArm("before", 4, (4,)),
    EchoArm("before", 2, (4,)),
    EchoArm("before", 8, (16,)),
)
"""Before augmentation, at each R; caps at the highest."""
_ELSEWHERE = tuple(
    EchoArm(place, ratio, (cap,))
    for place in ("after", "batch")
    for ratio, cap in ((4.0, 4), (8.0, 4), (8.0, 8))
)


@dataclass(frozen=True)
class Cell:
    """One way of echoing, on one task, for so many fresh batches."""

    task: str
    fresh_batches: int
    arm: EchoArm = NONE
    examples: int | None = None
    """Of the training examples, so many; None: all."""
    augments: bool = True
    is_short: bool = False
    """Whether only two settings are tried, to find errors."""

    @property
    def key(self) -> dict[str, Any]:
        """What identifies its row."""
        return {
            "task": self.task,
            "examples": self.examples,
            "augments": self.augments,
            "fresh_batches": self.fresh_batches,
            "arm": self.arm.name,
        }

    @property
    def settings(self) -> list[Settings]:
        """What is tried: all with all."""
        rates = task_of(self.task).rates
        every = [Settings(rate, warm_up) for rate in rates for warm_up in WARM_UPS]
        return every[:2] if self.is_short else every

    @property
    def steps(self) -> float:
        """About how many steps there are."""
        uses = min(self.arm.ratio, max(self.arm.caps)) if self.arm.caps else 1.0
        return self.fresh_batches * uses


def seeds_of(count: int = SEEDS, tuning: int = TUNING_SEEDS) -> list[int]:
    """Return the seeds of a cell: those whose results count, then those that choose settings."""
    return [*range(count), *range(TUNING_SEED, TUNING_SEED + tuning)]


def cells() -> list[Cell]:
    """Return all cells in the order in which they are begun."""
    return list(dict.fromkeys(_cells()))


def shortened(found: Iterable[Cell]) -> list[Cell]:
    """Return cells of the same kinds, short ones and each kind once, to find errors."""
    short = (
        replace(cell, fresh_batches=12, examples=320 if cell.examples else None, is_short=True)
        for cell in found
    )
    return list(dict.fromkeys(short))


def _cells() -> Iterator[Cell]:
    # The long trainings take longest: they begin before others, beside the short ones.
    for name, lengths in (("fashion", (2_400, 600, 150)), ("cifar", (1_500, 600, 150))):
        for length in lengths:
            yield from (Cell(name, length, arm) for arm in (NONE, *WIDE[:4]))
    yield from _lengths("cifar", (4_800,))
    # Does the default do harm where the data comes round often?
    for passes in (64, 16, 4):
        yield from _passes("fashion", 1_024, passes, WIDE[:3], augments=True)
    for name, examples in (("fashion", 1_024), ("digits", 1_024), ("friedman", 1_024)):
        for passes in (16, 4):
            yield from _passes(name, examples, passes, WIDE[:3])
    # Caps on more tasks, and where R is not above the smaller one.
    for name, length in (("fashion", 600), ("fashion", 150), ("cifar", 600), ("cifar", 150)):
        yield Cell(name, length, WIDE[4])
    yield Cell("words", 300, WIDE[4])
    for name, length in (("words", 300), ("words", 150), ("cifar", 300)):
        yield from (Cell(name, length, arm) for arm in (NONE, *WIDE[:4]))
    for name in ("fashion", "cifar", "words"):
        yield Cell(name, 150, EchoArm("before", 4, (8,)))
    yield from _lengths("words", (2_400, 1_200, 600))
    # Copies in one batch; a cap that falls.
    yield from _shapes("cifar", 600)
    yield from _shapes("fashion", 600)
    # Other places, other tasks.
    yield from (Cell("fashion", 600, arm) for arm in _ELSEWHERE)
    yield from (Cell("cifar", 600, arm) for arm in _ELSEWHERE)
    for passes in (32, 8, 2):
        yield from _passes("features", 2_048, passes, WIDE[:3])
    yield from (Cell("views", 300, arm) for arm in (NONE, WIDE[2]))
    yield from _lengths("fashion", (300, 1_200, 2_400, 4_800, 9_600))
    yield from _lengths("cifar", (300, 1_200, 2_400))
    yield from _lengths("views", (600,))
    # Where does harm begin?
    for name in ("fashion", "friedman"):
        for examples, passes in ((1_024, 2), (1_024, 8), (4_096, 4), (4_096, 16)):
            yield from _passes(name, examples, passes, WIDE[2:3])
    yield from _passes("friedman", 256, 64, WIDE[2:3])


def _shapes(name: str, length: int) -> Iterator[Cell]:
    """Yield copies in one batch and apart, and caps that fall and that do not."""
    for arm in (
        NONE,
        WIDE[2],
        EchoArm("together", 4, (4,)),
        WIDE[0],
        EchoArm("before", 8, (8, 4, 2)),
        EchoArm("before", 8, (16, 8, 4)),
    ):
        yield Cell(name, length, arm)


def _passes(
    name: str, examples: int, passes: int, arms: Iterable[EchoArm], augments: bool = False
) -> Iterator[Cell]:
    length = examples * passes // task_of(name).batch_size
    for arm in (NONE, *arms):
        yield Cell(name, length, arm, examples, augments)


def _lengths(name: str, lengths: Iterable[int]) -> Iterator[Cell]:
    """Yield longer trainings without echoing: how long is as good as with it?"""
    yield from (Cell(name, length) for length in lengths)


def made(cell: Cell, folder: Any, device: str) -> Task:
    """Return the task of a cell."""
    return task_of(cell.task)(folder, device, cell.examples, cell.augments)
