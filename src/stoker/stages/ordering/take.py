"""The first examples of an epoch, or all but these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from stoker.basics.validate import is_whole_number
from stoker.basics.warn import warn
from stoker.errors import CombinationError
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource
from stoker.stages.stage import ChainStage, ChainView, Traits, refuse_behind


@dataclass(frozen=True)
class Take(ChainStage):
    """The stage ``.take(n)``: only numbers decide, so nothing else is read.

    Attributes:
        n: how many examples go on at most.
    """

    n: int
    traits = Traits(selects=True, keeps_fields=True)
    method: ClassVar[str] = "take"
    least: ClassVar[int] = 1
    of_batches: ClassVar[str] = ".steps(n) ends an epoch after n batches"

    @classmethod
    def of(cls, n: Any) -> Self:
        """Check the argument of ``.take()``."""
        if not is_whole_number(n):
            raise TypeError(f".{cls.method}() takes a whole number of examples, not {n!r}")
        if n < cls.least:
            raise ValueError(f".{cls.method}() takes a number from {cls.least} on, not {n}")
        return cls(int(n))

    @property
    def call(self) -> str:
        return f"{self.method}({self.n:,})"

    def bind(self, before: ChainView) -> Self:
        """Check that numbers alone say which examples are the first."""
        if before.source.yields_batches:
            raise CombinationError(
                f".{self.method}() counts examples, and a loader yields batches: {self.of_batches}"
            )
        refuse_behind(
            f"{self.method}()",
            before,
            lambda t: t.filters or t.skips or t.repeats or t.batches or t.joins,
            f"put it before ({self.of_batches})",
        )
        return self

    def warn_of_one_class(self, before: ChainView) -> None:
        """Warn where the first examples of a folder that is sorted by class are all of one."""
        source = before.source
        if not isinstance(source, IndexedSource) or not source.lies_by_class:
            return
        if before.selection.is_shuffled:
            return
        candidates = before.selection.candidates(len(source))
        first = candidates.at(range(min(self.n, len(candidates))))
        labels = source.labels()
        kept = np.unique(labels[first])
        if len(kept) == 1 and len(np.unique(labels)) > 1:
            name = source.attribute("class_names")[kept[0]]
            warn(
                f".{self.call} keeps examples of one class, {name!r}, since "
                f"{source.name} is sorted by class: .take({self.n}, seed=0) draws them from all"
            )

    def select(self, selection: Selection) -> Selection:
        return selection.take(self.n)

    def signature(self) -> str:
        return self.call


@dataclass(frozen=True)
class SkipFirst(Take):
    """The stage ``.skip(n)``: of what has numbers, nothing else is read.

    Attributes:
        n: how many examples do not go on.
    """

    method = "skip"
    least = 0
    of_batches = ".resume_at(n) starts the next epoch after n batches"

    def bind(self, before: ChainView) -> Self:
        """Check that the first examples are the same in each epoch, too."""
        if before.source.has_own_order:
            raise CombinationError(
                "an epoch of a mixture continues at the end of the last one: skip in its parts, "
                f"stoker.mix([a.skip({self.n}), b])"
            )
        return super().bind(before)

    def select(self, selection: Selection) -> Selection:
        return selection.skip(self.n)
