"""An order of the user's own: a function says which examples an epoch has, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.basics.validate import is_whole_number
from stoker.schedule.orders.drawing import OwnDrawing
from stoker.schedule.selection import Selection
from stoker.stages.functions.operation import unfit_signature
from stoker.stages.ordering.select import check_numbers
from stoker.stages.stage import ChainStage, ChainView, Traits


@dataclass(frozen=True)
class OwnOrder(ChainStage):
    """The stage ``.order(fn)``.

    Attributes:
        fn: called as ``fn(epoch, rng)`` in each epoch.
        length: how many examples an epoch has, None for as many as there are.
    """

    fn: Callable[..., Any]
    length: int | None
    traits = Traits(selects=True, shuffles=True, keeps_fields=True)

    @staticmethod
    def of(fn: Any, length: Any) -> OwnOrder:
        """Check the arguments of ``.order()``."""
        if not callable(fn):
            raise TypeError(
                ".order() needs a function of epoch and rng that returns numbers of the source, "
                f"not {type(fn).__name__}: .order(lambda epoch, rng: numbers)"
            )
        if (unfit := unfit_signature(fn, 2)) is not None:
            raise TypeError(
                f".order() calls fn(epoch, rng), which {unfit} does not take: give it two "
                "parameters"
            )
        if length is not None and not is_whole_number(length):
            raise TypeError(f".order() takes length= as a whole number, not {length!r}")
        if length is not None and length < 1:
            raise ValueError(f".order(): an epoch has at least one example, not {length}")
        return OwnOrder(fn, None if length is None else int(length))

    @property
    def call(self) -> str:
        called = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"order({called}{'' if self.length is None else f', length={self.length:,}'})"

    def bind(self, before: ChainView) -> OwnOrder:
        """Check that there are numbers to order."""
        check_numbers(before, "order(...)", "sample(weights)")
        return self

    def select(self, selection: Selection) -> Selection:
        return selection.draw(OwnDrawing(self.fn, self.length, self.call))

    def signature(self) -> str:
        return "order(fn)" if self.length is None else f"order(fn, length={self.length})"
