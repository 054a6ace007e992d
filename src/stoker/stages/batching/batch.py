"""The stage ``.batch(n)``: examples become batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stoker.basics.compact_integers import check_integer
from stoker.basics.validate import is_whole_number
from stoker.batching.user_collate import Collate
from stoker.engine.flow import Flow
from stoker.engine.work.step import Stack
from stoker.errors import CombinationError
from stoker.sources.origin import UserObject
from stoker.stages.stage import ChainStage, ChainView, Traits, refuse_behind


@dataclass(frozen=True)
class Batch(ChainStage):
    """The stage ``.batch(n)``."""

    n: int
    drop_last: bool
    collate: Collate | None
    traits = Traits(batches=True)

    @staticmethod
    def of(n: Any, drop_last: Any, collate: Any) -> Batch:
        """Check the arguments of ``.batch()``."""
        if not is_whole_number(n):
            raise TypeError(f"a batch size is a whole number, not {n!r}")
        if n < 1:
            raise ValueError(f"a batch has at least one example, not {n}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be a function, not {type(collate).__name__}")
        return Batch(int(n), bool(drop_last), collate)

    @property
    def size(self) -> int | list[int]:
        """How large batches are, as a state says it; other ranks may go on with another size."""
        return self.n

    def of_ranks(self, rank: int, world: int, batches: Any, examples: int) -> Batch:
        return replace(self, n=check_integer(batches, 1))

    @property
    def call(self) -> str:
        return f"batch({self.n})"

    def bind(self, before: ChainView) -> Batch:
        """Check that single examples come here, from pools that hold a batch."""
        if before.source.yields_batches:
            raise CombinationError("a loader yields batches already: set its batch_size")
        refuse_behind(f"batch({self.n})", before, lambda t: t.batches, "batch once")
        if before.echo is not None:
            before.echo.check_holds(self.n)
        return self

    @property
    def stack(self) -> Stack:
        """What it tells the engine."""
        is_planned = self.batch_rule is not None
        return Stack(self.name, self.n, self.drop_last, self.collate, is_planned)

    def add_to(self, flow: Flow) -> None:
        flow.into(self.stack)

    def user_objects(self) -> list[UserObject]:
        return self.stack.user_objects()

    def count(self, items: int) -> int:
        return self.stack.count(items)

    def signature(self) -> str:
        """Return its size, and what becomes of the rest."""
        return f"batch({self.n}, drop_last={self.drop_last})"
