"""Packing: ragged sequences joined into full ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.validate import is_whole_number
from stoker.stages.stage import (
    ChainStage,
    ChainView,
    EnginePlan,
    PoolSize,
    Traits,
    first_with,
    not_known,
)


class Packed(NamedTuple):
    """An example behind ``.pack(length)``: arrays ``[length]``."""

    tokens: NDArray[np.int64]
    segments: NDArray[np.int32]
    """Which of the sequences in it a token is of, from 0 on."""
    positions: NDArray[np.int32]
    """The token's place among those of its segment, from 0 on."""


@dataclass(frozen=True)
class Pack(ChainStage):
    """The stage ``.pack(length)``.

    Attributes:
        length: of what comes out, in tokens.
    """

    length: int
    traits = Traits(joins=True)

    @staticmethod
    def of(length: Any) -> Pack:
        """Check the argument of ``.pack()``."""
        if not is_whole_number(length):
            raise TypeError(f".pack() takes a whole number of tokens, not {length!r}")
        if length < 1:
            raise ValueError(f".pack() makes sequences of at least one token, not {length}")
        return Pack(int(length))

    @property
    def call(self) -> str:
        return f"pack({self.length:,})"

    def bind(self, before: ChainView) -> Pack:
        """Check that single sequences come here."""
        if before.source.yields_batches:
            raise ValueError(".pack() joins single sequences, and a loader yields batches")
        stage = first_with(before.stages, lambda t: t.batches or t.joins)
        if stage is not None:
            raise ValueError(f".pack() cannot follow {stage.name}: put it before .batch(), once")
        return self

    def lower(self, to: EnginePlan) -> None:
        to.pack(self)

    def count(self, items: int) -> int:
        """Raise TypeError: only the end tells."""
        raise not_known()

    def signature(self) -> str:
        return self.call

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        return "  sequences are joined, and cut where one is full"
