"""Filters: which examples go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.pytree import Field
from stoker.sources.source import check_fields
from stoker.stages.map import account_behind, check_function, check_on, fields_reach, skip_note
from stoker.stages.skip import RAISE, Budget, OnError, budget_of
from stoker.stages.stage import Before, Lowering, PoolSize, Traits, not_known


@dataclass(frozen=True)
class Filter:
    """The stage ``.filter(fn)``, and its ``Operation``.

    Attributes:
        fn: called as ``fn(x)``; examples for which it is true go on.
        on: the field it looks at, or None for the whole example.
        budget: its own skip budget, or None for the pipeline's.
        account: tells its budget from those of other stages; 0 where it has none.
    """

    fn: Callable[[Any], Any]
    on: str | int | None
    budget: Budget | None = None
    account: int = 0

    makes_values = False

    @classmethod
    def of(cls, fn: Any, on: Any, on_error: OnError | None) -> Filter:
        """Check the arguments of ``.filter()``."""
        check_function(fn, random=False, stage="filter")
        check_on(on)
        return cls(fn, on, None if on_error is None else budget_of(on_error))

    @property
    def name(self) -> str:
        """Name the stage for people."""
        called = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"filter({called}{'' if self.on is None else f', on={self.on!r}'})"

    @property
    def traits(self) -> Traits:
        """What it does, as far as others ask."""
        skips = self.budget is not None and self.budget != RAISE
        return Traits(filters=True, skips=skips, keeps_fields=True)

    def placed(self, before: Before) -> Filter:
        """Check that single examples come here, with the field that it looks at."""
        if before.is_batched:
            raise ValueError(".filter() works on examples: put it before .batch()")
        if fields_reach(before.stages):
            check_fields(before.source, self.on)
        return replace(self, account=0 if self.budget is None else account_behind(before))

    def begin(self, chain: Before) -> None:
        """Do nothing."""

    def lower(self, to: Lowering) -> None:
        """Have it called with each example."""
        to.filter(self)

    def count(self, items: int) -> int:
        """Raise TypeError: only the end tells."""
        raise not_known()

    def outline(self) -> str:
        """Return where it looks."""
        return "filter" + ("" if self.on is None else f" on {self.on!r}")

    def note(self, chain: Before, sizes: Mapping[int, PoolSize]) -> str:
        """Say what it skips."""
        return skip_note(self.budget)

    def compile(self, rejected: object) -> Callable[..., Any]:
        """Return a function of an example that returns it, or ``rejected``."""
        return _Filtered(self.fn, None if self.on is None else Field(self.on), rejected)

    def key(self, seed: int, epoch: int, rank: int) -> None:
        """Return None: it draws nothing."""
        return None

    def watched(
        self, fn: Callable[..., Any], tell: Callable[[int, str], None]
    ) -> Callable[..., Any]:
        """Return ``fn``: it draws nothing."""
        return fn


class _Filtered:
    """Pickles if the function does."""

    def __init__(self, fn: Callable[[Any], Any], field: Field | None, rejected: Any) -> None:
        self._fn = fn
        self._field = field
        self._rejected = rejected

    def __call__(self, example: Any) -> Any:
        seen = example if self._field is None else self._field.get(example)
        return example if self._fn(seen) else self._rejected
