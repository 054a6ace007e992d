"""Taking the first examples of an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.checks import is_whole_number
from stoker.stages.stage import Stage, Traits, first_with

if TYPE_CHECKING:
    from stoker.chain import Chain
    from stoker.engine.lower import Lowering


@dataclass(frozen=True)
class Take(Stage):
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
    def name(self) -> str:
        return f"take({self.n:,})"

    def placed(self, before: Chain) -> Take:
        """Check that numbers alone say which examples are the first."""
        if before.source.yields_batches:
            raise ValueError(
                f".take() counts examples, and a loader yields batches: .steps({self.n}) ends an "
                "epoch after so many"
            )
        stage = first_with(
            before.stages, lambda t: t.filters or t.skips or t.repeats or t.batches or t.joins
        )
        if stage is not None:
            raise ValueError(
                f".take() cannot follow {stage.name}: put it before (.steps(n) ends an epoch after "
                "n batches)"
            )
        return self

    def lower(self, to: Lowering) -> None:
        to.take(self.n)

    def count(self, items: int) -> int:
        return min(self.n, items)

    def outline(self) -> str:
        return self.name
