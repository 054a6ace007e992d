"""Echoing: where in the chain items are kept and used again."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from stoker.schedule.factor import uses_of_first
from stoker.schedule.record import RunRecord

DEFAULT_POOL_BATCHES = 16
DEFAULT_POOL_MEMORY_FRACTION = 0.1
DEFAULT_MAX_FACTOR = 4


@dataclass(frozen=True)
class Echo:
    """The stage ``.echo(factor, pool=...)``.

    Attributes:
        factor: the exact echoing factor, above 1 (a factor of 1 leaves no stage behind), or None
            where it follows the stall.
        max_factor: how often an item is used at most.
        pool: the pool's size in items, or None.
        pool_bytes: the pool's size in bytes, or None; with neither, the default.
        position: how many echoes stand before it in the chain: part of its address.
        record: decisions of an earlier run that are replayed, or None.
    """

    factor: Fraction | None
    max_factor: int
    pool: int | None
    pool_bytes: int | None
    position: int
    record: RunRecord | None = None

    @property
    def name(self) -> str:
        """Name the stage for people."""
        if self.factor is not None:
            return f"echo({float(self.factor):g})"
        return f"echo(auto, max_factor={self.max_factor})"

    @property
    def follows(self) -> bool:
        """Whether the factor follows the stall."""
        return self.factor is None

    def uses(self, items: int) -> int | None:
        """Return the uses that so many fresh items have, None where that is not known before."""
        return None if self.factor is None else uses_of_first(self.factor, items)

    def smallest_distinct(self, group: int) -> int:
        """Return the least pool, in items, that keeps the uses of a batch distinct.

        Where the factor follows the stall: that lets a batch consist of items used before, none of
        them in the batch before it.
        """
        return (2 if self.follows else self.max_factor) * group
