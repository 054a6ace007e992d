"""What a workload is: data, augmentation, network and recipe of one training task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

Part = Literal["validation", "test"]
Batch = Any
"""A tuple of arrays or CPU tensors, all with the batch as their first axis."""


class Examples(Protocol):
    """Raw training examples; several threads read them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


Transform = Callable[[Batch, np.random.Generator], Batch]
"""Returns a batch that is augmented once more, anew for each use."""

SMALL_EXAMPLES = 1_000
SMALL_EPOCHS = 16


@dataclass(frozen=True)
class Recipe:
    """The numbers of a training, the same for all arms."""

    batch_size: int
    budget_fresh: int
    """Fresh examples of a run, whatever its arm."""
    learning_rates: tuple[float, ...]
    """Candidates: every arm has the one that is best for it."""
    step_s: float = 0.005
    """Time of a training step where steps sleep, in seconds."""
    evaluations: int = 40
    """Tests during a run, at equal distances of fresh examples."""
    tuning_seeds: int = 2
    """Runs of each candidate, on seeds of their own."""

    @property
    def spacing_fresh(self) -> int:
        """Fresh examples from one test to the next."""
        return self.budget_fresh // self.evaluations


@dataclass(frozen=True)
class Variant:
    """How a workload differs from itself, for questions of one kind."""

    batch_norm: bool = True
    momentum: bool = True
    augmentation: bool = True
    small: bool = False
    """Few examples, seen in many epochs."""
    batch_size: int | None = None
    """Another batch size."""
    pool_batches: int | None = None
    """Another size of the echo's pool; with it, another distance between copies."""
    fresh_batches: int | None = None
    """Another length of training."""
    by_steps: bool = False
    """The learning rate follows the steps, as if they were fresh: the wrong schedule."""

    @property
    def name(self) -> str:
        """What is different, for people and rows; "" where nothing is."""
        parts = [
            f"without {what}"
            for what, there in (
                ("BatchNorm", self.batch_norm),
                ("momentum", self.momentum),
                ("augmentation", self.augmentation),
            )
            if not there
        ]
        parts += ["small data"] * self.small
        parts += [f"B = {self.batch_size}"] * (self.batch_size is not None)
        parts += [f"pool of {self.pool_batches} batches"] * (self.pool_batches is not None)
        parts += [f"{self.fresh_batches} fresh batches"] * (self.fresh_batches is not None)
        parts += ["scheduled by steps"] * self.by_steps
        return ", ".join(parts)


class Score(NamedTuple):
    """What a test found."""

    loss: float
    """Mean over the examples of a part; the lower, the better."""
    metric: float
    """What `Workload.metric` names."""


class Workload(ABC):
    """One training task. Made once in each process, and read by several threads.

    A subclass sets `name`, `title`, `metric`, `recipe`, and in `load` the attribute `train`: raw
    training examples, with `__len__` and `__getitem__`.
    """

    name: ClassVar[str]
    """The word on the command line."""
    title: ClassVar[str]
    """What is trained, in a line."""
    metric: ClassVar[str]
    """The second thing that is measured, beside the loss."""
    has_batch_norm: ClassVar[bool] = False
    """Whether there is a variant without."""
    transforms: ClassVar[tuple[str, ...]] = ()
    """What can be done to each use of a whole batch; the first is tried unless others are named."""
    recipe: Recipe

    train: Examples

    def __init__(self, variant: Variant, folder: Path | None) -> None:
        self.variant = variant
        self.recipe = self.recipe_of(variant, folder is None)
        self.load(folder)
        if variant.small:
            self.train = _First(self.train, SMALL_EXAMPLES)

    @classmethod
    def recipe_of(cls, variant: Variant, quick: bool) -> Recipe:
        """Return its recipe in a variant; `quick`, a few steps of it."""
        found = cls.recipe
        if variant.batch_size is not None:
            found = replace(found, batch_size=variant.batch_size)
        if variant.fresh_batches is not None:
            found = replace(found, budget_fresh=variant.fresh_batches * found.batch_size)
        if variant.small:
            found = replace(found, budget_fresh=SMALL_EXAMPLES * SMALL_EPOCHS)
        if quick:
            found = replace(
                found,
                budget_fresh=12 * found.batch_size,
                learning_rates=found.learning_rates[1:3],
                step_s=0.002,
                evaluations=4,
                tuning_seeds=1,
            )
        return found

    @abstractmethod
    def load(self, folder: Path | None) -> None:
        """Read the data of `folder`; None: make up a little of the same shapes.

        Raises MissingData.
        """

    def prepare(self, raw: Any) -> Any:
        """Turn a raw example into one that can be augmented: once for each fresh example."""
        return raw

    @abstractmethod
    def augment(self, example: Any, rng: np.random.Generator) -> Any:
        """Return a new example, drawn anew for each use where the echo stands before.

        Without augmentation (`variant`) it draws nothing.
        """

    def transform(self, name: str) -> Transform:
        """Return one of `transforms`."""
        raise LookupError(name)

    @abstractmethod
    def network(self) -> Any:
        """Return a new network, initialised from torch's generator."""

    @abstractmethod
    def optimizer(self, network: Any, learning_rate: float) -> Any:
        """Return its optimizer."""

    @abstractmethod
    def loss(self, network: Any, batch: Batch) -> Any:
        """Return the scalar that is trained on."""

    @abstractmethod
    def score(self, network: Any, part: Part) -> Score:
        """Test a network that is in evaluation mode."""


class _First:
    """The first `count` of some examples."""

    def __init__(self, examples: Examples, count: int) -> None:
        self._examples = examples
        self._count = min(count, len(examples))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]
