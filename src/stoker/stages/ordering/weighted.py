"""The stage ``.sample(weights)``: how often an example comes follows its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.basics.validate import is_whole_number
from stoker.engine.checkpoint import PoolSize
from stoker.schedule.orders.weighted import WeightedDrawing, Weights, as_weights
from stoker.schedule.selection import Selection
from stoker.sources.origin import SourceBase, numbers_of
from stoker.stages.functions.operation import unfit_signature
from stoker.stages.ordering.select import check_numbers
from stoker.stages.stage import ChainStage, ChainView, Traits


@dataclass(frozen=True)
class Sample(ChainStage):
    """The stage ``.sample(weights)``.

    Attributes:
        given: the weights, the field that has them, or a function of the epoch that returns some.
        num_samples: how many examples an epoch has, None for as many as there are.
        replacement: whether an example may come several times in an epoch.
        weights: what is drawn by; a function is asked in each epoch. None until it is bound.
        length: of the source then.
    """

    given: Any = field(compare=False, repr=False)
    num_samples: int | None
    replacement: bool
    weights: Weights | Callable[[int], Any] | None = field(default=None, compare=False, repr=False)
    length: int = 0
    traits = Traits(selects=True, shuffles=True, keeps_fields=True)

    @staticmethod
    def of(weights: Any, num_samples: Any, replacement: Any) -> Sample:
        """Check the arguments of ``.sample()``."""
        if num_samples is not None and not is_whole_number(num_samples):
            raise TypeError(f".sample() takes num_samples= as a whole number, not {num_samples!r}")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f".sample(): an epoch has at least one example, not {num_samples}")
        if callable(weights) and (unfit := unfit_signature(weights, 1)) is not None:
            raise TypeError(
                f".sample() calls weights(epoch), which {unfit} does not take: give it one "
                "parameter"
            )
        if not isinstance(replacement, bool):
            raise TypeError(f".sample() takes replacement=True or False, not {replacement!r}")
        number = None if num_samples is None else int(num_samples)
        return Sample(weights, number, replacement)

    @property
    def call(self) -> str:
        count = "" if self.num_samples is None else f", num_samples={self.num_samples:,}"
        count += "" if self.replacement else ", replacement=False"
        return f"sample(weights{count})"

    def bind(self, before: ChainView) -> Sample:
        """Check that there are weights for the source's examples."""
        source = check_numbers(before, "sample(weights)")
        length = len(source)
        if callable(self.given):
            return replace(self, weights=self.given, length=length)
        candidates = before.selection.candidates(length)
        try:
            given = self.given
            is_field = isinstance(given, (str, int))
            given = numbers_of(source, given, ".sample()") if is_field else given
            values = as_weights(given, length)
            return replace(self, weights=Weights(values, candidates), length=length)
        except (TypeError, ValueError) as error:
            raise type(error)(f".sample(): {error}") from None

    def check_length(self, was: SourceBase, now: SourceBase) -> None:
        if not callable(self.given):
            raise ValueError(
                f"{was.name} had {self.length:,} examples when weights were given, and has "
                f"{now.count():,} now: give a function of the epoch, or build the "
                "pipeline anew"
            )

    def select(self, selection: Selection) -> Selection:
        assert self.weights is not None
        return selection.draw(WeightedDrawing(self.weights, self.num_samples, self.replacement))

    def signature(self) -> str:
        digest = f", {self.weights.digest}" if isinstance(self.weights, Weights) else ", fn"
        return f"{self.call[:-1]}{digest})"

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say how many of a batch are repeats, if some are."""
        if not isinstance(self.weights, Weights) or not chain.is_batched or not self.replacement:
            return ""
        count = self.num_samples
        if count is None:
            count = len(chain.selection.candidates(self.length))
        batch = min(chain.batch_size, count)
        repeats = round(self.weights.repeats(batch, count))
        return f"  about {repeats:,} of {batch:,} in a batch are repeats" if repeats else ""
