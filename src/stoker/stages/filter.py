"""Filters: stages that keep the examples that a function accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.basics.pytree import Field, Fields, fields_of
from stoker.engine.flow import Flow
from stoker.engine.skip import MaxErrors
from stoker.errors import CombinationError
from stoker.stages.functions.operation import Operation, check_budget, names_of
from stoker.stages.stage import ChainView, Traits, not_known


@dataclass(frozen=True)
class Filter(Operation):
    """The stage ``.filter(fn)``: examples for which ``fn(x)`` is true go on."""

    method = "filter"
    makes_values = False

    @staticmethod
    def of(fn: Any, on: Any, max_errors: MaxErrors | None) -> Filter:
        """Check the arguments of ``.filter()``."""
        return Filter(fn, names_of(on), check_budget("filter", fn, on, max_errors))

    @property
    def traits(self) -> Traits:
        return Traits(
            filters=True, skips=self.skips, keeps_fields=True, inside=self.part is not None
        )

    def bind(self, before: ChainView) -> Filter:
        """Check that single examples come here, with the field that it looks at."""
        if before.is_batched:
            raise CombinationError(".filter() works on examples: put it before .batch()")
        return self.place_on(before)

    def add_to(self, flow: Flow) -> None:
        flow.then(self)

    def count(self, items: int) -> int:
        """Raise TypeError: only the end tells."""
        raise not_known()

    def compile(self, rejected: object) -> Callable[..., Any]:
        return _Filtered(self.fn, None if self.on is None else fields_of(self.on), rejected)


class _Filtered:
    """Pickles if the function does."""

    def __init__(
        self, fn: Callable[[Any], Any], field: Field | Fields | None, rejected: Any
    ) -> None:
        self._fn = fn
        self._field = field
        self._rejected = rejected

    def __call__(self, example: Any) -> Any:
        seen = example if self._field is None else self._field.get(example)
        return example if self._fn(seen) else self._rejected
