"""Shuffling: a new order every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.checks import is_whole_number
from stoker.stages.stage import Stage, Traits, first_with

if TYPE_CHECKING:
    from stoker.chain import Chain
    from stoker.engine.lower import Lowering

DEFAULT_BUFFER = 1_000
"""Examples in a shuffle buffer, unless the user says otherwise."""


@dataclass(frozen=True)
class Shuffle(Stage):
    """The stage ``.shuffle()``: a permutation keyed by seed and epoch (see ``orders``).

    Attributes:
        buffer: of a stream, how many examples are shuffled among each other; None otherwise.
    """

    buffer: int | None = None
    traits = Traits(selects=True, shuffles=True, keeps_fields=True)

    @property
    def name(self) -> str:
        return f"shuffle({f'buffer={self.buffer:,}' if self.buffer else ''})"

    def placed(self, before: Chain) -> Shuffle:
        """Check that there is an order to draw, and how."""
        source = before.source
        if source.yields_batches:
            raise ValueError("a loader has an order of its own: shuffle there (shuffle=True)")
        if source.has_own_order:
            raise ValueError(
                "the parts of a mixture are shuffled each on its own: stoker.mix({a.shuffle(): 2, "
                "b.shuffle(): 1})"
            )
        stage = first_with(before.stages, lambda t: t.repeats or t.batches or t.shuffles)
        if stage is not None:
            raise ValueError(f".shuffle() cannot follow {stage.name}: put it first")
        if source.is_indexed:
            if self.buffer is not None:
                raise ValueError(
                    "a buffer is for streams; this source is shuffled as a whole: .shuffle()"
                )
            return self
        buffer: Any = DEFAULT_BUFFER if self.buffer is None else self.buffer
        if not is_whole_number(buffer) or buffer < 2:
            raise ValueError(f"a shuffle buffer holds at least two examples, not {buffer!r}")
        return Shuffle(int(buffer))

    def lower(self, to: Lowering) -> None:
        to.shuffle(self.buffer or 1)

    def count(self, items: int) -> int:
        return items

    def outline(self) -> str:
        return self.name
