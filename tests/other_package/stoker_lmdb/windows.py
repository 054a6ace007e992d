"""Two stages that make each output of some inputs: sliding windows, and one example in a few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import stoker


@dataclass(frozen=True)
class Windows(stoker.WindowStage):
    """Stacks neighbours: examples ``(x, y)`` to ``(xs [size, ...], ys [size, ...])``.

    Args:
        size: how many.
        stride: how far a window begins behind the one before.
    """

    size: int
    stride: int = 1

    def inputs(self, output: int) -> range:
        first = output * self.stride
        return range(first, first + self.size)

    def make(self, examples: list[Any]) -> Any:
        return tuple(map(np.stack, zip(*examples, strict=True)))

    def describe(self) -> str:
        return f"windows({self.size}, stride={self.stride})"


@dataclass(frozen=True)
class Every(stoker.WindowStage):
    """Keeps one example in ``n``, the first one included."""

    n: int

    def inputs(self, output: int) -> range:
        return range(output * self.n, output * self.n + 1)

    def make(self, examples: list[Any]) -> Any:
        return examples[0]

    def describe(self) -> str:
        return f"every({self.n})"
