"""The stage ``.batch(n)``: examples become batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from stoker.basics.compact_integers import check_integer
from stoker.basics.validate import is_whole_number
from stoker.errors import CombinationError
from stoker.sources.origin import UserObject
from stoker.stages.batching.user_collate import Collate
from stoker.stages.skip import RAISE
from stoker.stages.stage import ChainStage, ChainView, EnginePlan, Traits, first_with


@dataclass(frozen=True)
class Batch(ChainStage):
    """The stage ``.batch(n)``.

    Attributes:
        late: how many batches an example that is not ready may move on by.
    """

    n: int
    drop_last: bool
    collate: Collate | None
    late: int = field(default=0, kw_only=True)
    traits = Traits(batches=True)

    @staticmethod
    def of(n: Any, drop_last: Any, collate: Any, late: Any = 0) -> Batch:
        """Check the arguments of ``.batch()``."""
        if not is_whole_number(late):
            raise TypeError(f"late= is a number of batches, not {late!r}")
        if late < 0:
            raise ValueError(f"late= is a number of batches, not {late}")
        if not is_whole_number(n):
            raise TypeError(f"a batch size is a whole number, not {n!r}")
        if n < 1:
            raise ValueError(f"a batch has at least one example, not {n}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be a function, not {type(collate).__name__}")
        return Batch(int(n), bool(drop_last), collate, late=int(late))

    @property
    def size(self) -> int | list[int]:
        """How large batches are, as a state says it; other ranks may go on with another size."""
        return self.n

    def of_size(self, size: Any, world: int, examples: int) -> Batch:
        """Return this with batches of another size, for ``world`` ranks.

        Args:
            size: as ``size`` says it.
            world: the number of ranks.
            examples: the length of the source.

        Raises TypeError or ValueError for what is no size.
        """
        return replace(self, n=check_integer(size, 1))

    @property
    def call(self) -> str:
        return f"batch({self.n}, late={self.late})" if self.late else f"batch({self.n})"

    def bind(self, before: ChainView) -> Batch:
        """Check that single examples come here, from pools that hold a batch."""
        if before.source.yields_batches:
            raise CombinationError("a loader yields batches already: set its batch_size")
        stage = first_with(before.stages, lambda t: t.batches)
        if stage is not None:
            raise CombinationError(f".batch({self.n}) cannot follow {stage.name}: batch once")
        if before.echo is not None:
            before.echo.check_holds(self.n)
        if self.late:
            self._check_late(before)
        return self

    def _check_late(self, before: ChainView) -> None:
        """Refuse what decides about examples in their order, and what has no order."""
        if not before.source.is_indexed:
            raise ValueError(
                f".{self.call} makes examples out of order, and a stream has one order alone"
            )
        stage = first_with(
            before.stages, lambda t: t.filters or t.skips or t.repeats or t.joins or t.scans
        )
        if stage is not None and stage.traits.repeats:
            raise ValueError(
                f".{stage.name} decides on numbers alone which uses are in a batch: leave out "
                f'late={self.late}. .echo("auto") uses what is there while examples are late'
            )
        if stage is not None or before.budget != RAISE:
            name = "on_error=" if stage is None else f".{stage.name}"
            raise ValueError(
                f"{name} decides about one example after another, and so waits for each: "
                f".{self.call} cannot follow it"
            )

    def begin(self, chain: ChainView) -> None:
        """Refuse what has to know the places of examples in batches."""
        if not self.late:
            return
        share = chain.selection.share
        if share is not None and share.padding is not None:
            raise ValueError(f".shard(pad=) says which rows are padding before .{self.call}")
        if first_with(chain.stages, lambda t: t.repeats) is not None:
            raise ValueError(f".echo() uses batches again by their number: without .{self.call}")

    def lower(self, to: EnginePlan) -> None:
        to.batch(self)

    def user_objects(self) -> list[UserObject]:
        return [] if self.collate is None else [UserObject("collate of " + self.name, self.collate)]

    def count(self, items: int) -> int:
        """Return the number of batches that so many examples make."""
        return items // self.n if self.drop_last else -(-items // self.n)

    def signature(self) -> str:
        """Return its size, and what becomes of the rest."""
        late = f", late={self.late}" if self.late else ""
        return f"batch({self.n}, drop_last={self.drop_last}{late})"
