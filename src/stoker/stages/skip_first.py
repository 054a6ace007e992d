"""Leaving out the first examples of an epoch: what ``.take()`` of as many would leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.checks import is_whole_number
from stoker.stages.stage import Stage, Traits, first_with

if TYPE_CHECKING:
    from stoker.chain import Chain
    from stoker.engine.lower import Lowering


@dataclass(frozen=True)
class SkipFirst(Stage):
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
    def name(self) -> str:
        return f"skip({self.n:,})"

    def placed(self, before: Chain) -> SkipFirst:
        """Check that numbers alone say which examples are the first, in each epoch alike."""
        if before.source.yields_batches:
            raise ValueError(
                f".skip() counts examples, and a loader yields batches: .resume_at({self.n}) "
                f"starts the next epoch after {self.n} batches"
            )
        if before.source.has_own_order:
            raise ValueError(
                "an epoch of a mixture continues at the end of the last one: skip in its parts, "
                f"stoker.mix({{a.skip({self.n}): 2, b: 1}})"
            )
        stage = first_with(
            before.stages, lambda t: t.filters or t.skips or t.repeats or t.batches or t.joins
        )
        if stage is not None:
            raise ValueError(
                f".skip() cannot follow {stage.name}: put it before (.resume_at(n) starts the next "
                "epoch after n batches)"
            )
        return self

    def lower(self, to: Lowering) -> None:
        to.skip(self.n)

    def count(self, items: int) -> int:
        return max(0, items - self.n)

    def outline(self) -> str:
        return self.name
