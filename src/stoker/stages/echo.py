"""Echoing: where in the chain items are kept and used again."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from stoker.echoing.factor import uses_of_first

DEFAULT_POOL_BATCHES = 16
DEFAULT_POOL_MEMORY_FRACTION = 0.1


@dataclass(frozen=True)
class Echo:
    """The stage ``.echo(factor, pool=...)``.

    Attributes:
        factor: the exact echoing factor, above 1 (a factor of 1 leaves no stage behind).
        pool: the pool's size in items, or None.
        pool_bytes: the pool's size in bytes, or None; with neither, the default.
        position: how many echoes stand before it in the chain: part of its address.
    """

    factor: Fraction
    pool: int | None
    pool_bytes: int | None
    position: int

    @property
    def name(self) -> str:
        """Name the stage for people."""
        return f"echo({float(self.factor):g})"

    def uses(self, items: int) -> int:
        """Return the uses that so many fresh items have."""
        return uses_of_first(self.factor, items)

    def smallest_distinct(self, group: int) -> int:
        """Return the least pool, in items, that keeps the uses of a batch distinct."""
        return -(-self.factor.numerator // self.factor.denominator) * group
