"""Two stages: one with a state, and one that is a filter and a map."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import stoker
from stoker.stages import ChainView


@dataclass(frozen=True)
class Dedup(stoker.Stage):
    """Lets the first example of each key through.

    Args:
        key: returns the key of an example: a number, or a text.
    """

    key: Callable[[Any], Hashable]

    def check(self, before: ChainView) -> None:
        if before.is_batched:
            raise ValueError("dedup looks at single examples: put it before .batch()")

    def lower(self, pipeline: stoker.Pipeline) -> stoker.Pipeline:
        return pipeline.scan(self.step, set(), dump=sorted, load=set)

    def step(self, seen: set[Any], example: Any) -> tuple[set[Any], Any]:
        key = self.key(example)
        if key in seen:
            return seen, stoker.DROP
        seen.add(key)
        return seen, example

    def describe(self) -> str:
        return f"dedup({getattr(self.key, '__name__', self.key)})"


@dataclass(frozen=True)
class Doubled(stoker.Stage):
    """Multiplies a field by two, by two maps.

    Args:
        on: the field.
    """

    on: str | int

    def lower(self, pipeline: stoker.Pipeline) -> stoker.Pipeline:
        return pipeline.map(self.fourfold, on=self.on).map(self.half, on=self.on)

    def fourfold(self, x: Any) -> Any:
        return x * 4

    def half(self, x: Any) -> Any:
        return x / 2

    def describe(self) -> str:
        return f"doubled({self.on!r})"
