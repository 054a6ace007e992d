"""Filters: which examples go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.pytree import Field
from stoker.stages.skip import Budget


@dataclass(frozen=True)
class Filter:
    """The stage ``.filter(fn)``.

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

    random = False

    @property
    def name(self) -> str:
        """Name the stage for people."""
        called = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"filter({called}{'' if self.on is None else f', on={self.on!r}'})"

    def compiled(self, rejected: Any) -> Callable[[Any], Any]:
        """Return a function of an example that returns it, or ``rejected``."""
        return _Sieved(self.fn, None if self.on is None else Field(self.on), rejected)


class _Sieved:
    """Pickles if the function does."""

    def __init__(self, fn: Callable[[Any], Any], field: Field | None, rejected: Any) -> None:
        self._fn = fn
        self._field = field
        self._rejected = rejected

    def __call__(self, example: Any) -> Any:
        seen = example if self._field is None else self._field.get(example)
        return example if self._fn(seen) else self._rejected
