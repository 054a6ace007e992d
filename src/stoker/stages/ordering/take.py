"""The first examples of an epoch, or all but these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.basics.validate import is_whole_number
from stoker.errors import CombinationError
from stoker.schedule.selection import Selection
from stoker.stages.stage import ChainStage, ChainView, Traits, first_with


@dataclass(frozen=True)
class Take(ChainStage):
    """The stage ``.take(n)``: only numbers decide, so nothing else is read.

    Attributes:
        n: how many examples go on at most.
    """

    n: int
    traits = Traits(selects=True, keeps_fields=True)

    @staticmethod
    def of(n: Any) -> Take:
        """Check the argument of ``.take()``."""
        if not is_whole_number(n):
            raise TypeError(f".take() takes a whole number of examples, not {n!r}")
        if n < 1:
            raise ValueError(f".take() leaves at least one example, not {n}")
        return Take(int(n))

    @property
    def call(self) -> str:
        return f"take({self.n:,})"

    def bind(self, before: ChainView) -> Take:
        """Check that numbers alone say which examples are the first."""
        if before.source.yields_batches:
            raise CombinationError(
                f".take() counts examples, and a loader yields batches: .steps({self.n}) ends an "
                "epoch after so many"
            )
        stage = first_with(
            before.stages, lambda t: t.filters or t.skips or t.repeats or t.batches or t.joins
        )
        if stage is not None:
            raise CombinationError(
                f".take() cannot follow {stage.name}: put it before (.steps(n) ends an epoch after "
                "n batches)"
            )
        return self

    def select(self, selection: Selection) -> Selection:
        return selection.take(self.n)

    def count(self, items: int) -> int:
        return min(self.n, items)

    def signature(self) -> str:
        return self.call


@dataclass(frozen=True)
class SkipFirst(ChainStage):
    """The stage ``.skip(n)``: only numbers decide; of what has numbers, nothing else is read.

    Attributes:
        n: how many examples do not go on.
    """

    n: int
    traits = Traits(selects=True, keeps_fields=True)

    @staticmethod
    def of(n: Any) -> SkipFirst:
        """Check the argument of ``.skip()``."""
        if not is_whole_number(n):
            raise TypeError(f".skip() takes a whole number of examples, not {n!r}")
        if n < 0:
            raise ValueError(f".skip() leaves out examples from 0 on, not {n}")
        return SkipFirst(int(n))

    @property
    def call(self) -> str:
        return f"skip({self.n:,})"

    def bind(self, before: ChainView) -> SkipFirst:
        """Check that numbers alone say which examples are the first, in each epoch alike."""
        if before.source.yields_batches:
            raise CombinationError(
                f".skip() counts examples, and a loader yields batches: .resume_at({self.n}) "
                f"starts the next epoch after {self.n} batches"
            )
        if before.source.has_own_order:
            raise CombinationError(
                "an epoch of a mixture continues at the end of the last one: skip in its parts, "
                f"stoker.mix({{a.skip({self.n}): 2, b: 1}})"
            )
        stage = first_with(
            before.stages, lambda t: t.filters or t.skips or t.repeats or t.batches or t.joins
        )
        if stage is not None:
            raise CombinationError(
                f".skip() cannot follow {stage.name}: put it before (.resume_at(n) starts the next "
                "epoch after n batches)"
            )
        return self

    def select(self, selection: Selection) -> Selection:
        return selection.skip(self.n)

    def count(self, items: int) -> int:
        return max(0, items - self.n)

    def signature(self) -> str:
        return self.call
