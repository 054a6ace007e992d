"""The costs or sizes of examples: a whole number for each, by its number in the source.

Whole numbers are compared and added alike on every machine; what a user gives as fractions is
rounded once, and a digest tells ranks, and states, whether they have the same.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What the largest of costs with fractions becomes: fine enough for any balance, and sums of 2^32
# of them fit in 64 bits.
_FINEST = 1 << 30


@dataclass(frozen=True)
class Costs:
    """A whole number for each example of a source, 0 or more.

    Attributes:
        values: the numbers, by example; of the smallest unsigned dtype that holds them.
        digest: what tells them from others.
    """

    values: NDArray[Any] = field(compare=False, repr=False)
    digest: str

    @staticmethod
    def of(numbers: NDArray[Any], asked: str, *, scaled: bool) -> Costs:
        """Return numbers as costs.

        Args:
            numbers: one for each example, shape [n].
            asked: who takes them, for errors.
            scaled: whether only their proportions count; otherwise they must be whole numbers.

        Raises ValueError, with the example, for a number that is negative, not finite or too large.
        """
        wrong = ~np.isfinite(numbers) | (numbers < 0)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{asked} takes numbers from 0 on, and that of example {at:,} is {numbers[at]}"
            )
        if numbers.dtype.kind == "f":
            most = float(numbers.max(initial=0))
            if scaled and most:
                numbers = np.rint(numbers * (_FINEST / most))
            elif (numbers != np.rint(numbers)).any():
                at = int(np.flatnonzero(numbers != np.rint(numbers))[0])
                raise ValueError(
                    f"{asked} takes whole numbers, and that of example {at:,} is {numbers[at]}: "
                    "round them up"
                )
        most = int(numbers.max(initial=0))
        if most > np.iinfo(np.int64).max >> 20:  # a million of them can be added
            at = int(np.argmax(numbers))
            raise ValueError(f"{asked}: the number of example {at:,}, {most:,}, is too large")
        values = np.ascontiguousarray(numbers, np.min_scalar_type(most))
        return Costs(values, f"{zlib.crc32(values.data):08x}")

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what examples cost, ``int64``."""
        return self.values[numbers].astype(np.int64)
