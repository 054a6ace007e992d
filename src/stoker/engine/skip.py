"""Skip budgets: the number of bad examples that a run may skip before it stops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.basics.validate import is_number

LEAST_SEEN = 1_000
"""If the length of an epoch is not known, a fraction is taken of at least so many examples: else
the first failure would already be 100 %."""

OnError = str | int | float
"""``"raise"``, or how many examples of an epoch may be skipped: a count, or a fraction."""


@dataclass(frozen=True)
class Budget:
    """The examples that may be skipped in an epoch: a count, or a fraction of its examples.

    A budget of no examples raises at the first failure, as if there were none.
    """

    count: int | None = None
    fraction: float = 0.0

    def allows(self, skipped: int, examples: int | None, seen: int) -> bool:
        """True if ``skipped`` examples are allowed, after ``seen`` of the epoch's ``examples``.

        ``examples`` is None if it is unknown.
        """
        if self.count is not None:
            return skipped <= self.count
        of = examples if examples is not None else max(seen, LEAST_SEEN)
        return skipped <= self.fraction * of * (1 + 1e-9)  # 29 of 100 are 0.29 of them

    def __str__(self) -> str:
        if self.count is not None:
            return f"{self.count:,}"
        return f"{self.fraction:.3g} of the examples" if self.fraction < 1 else "all examples"


# The default: the first example that fails ends the epoch.
RAISE = Budget(0)


def budget_of(on_error: Any) -> Budget:
    """Read ``on_error=``. Raises TypeError or ValueError for anything else than it takes."""
    if isinstance(on_error, str):
        if on_error == "raise":
            return RAISE
        raise ValueError(f"on_error= takes 'raise', a count or a fraction, not {on_error!r}")
    if not is_number(on_error):
        raise TypeError(
            f"on_error= takes 'raise', or how many examples may be skipped in an epoch: a count "
            f"such as 100, or a fraction such as 0.01; not {on_error!r}"
        )
    if isinstance(on_error, (int, np.integer)):
        if on_error < 0:
            raise ValueError(f"on_error= cannot skip {on_error} examples")
        return Budget(int(on_error))
    if not math.isfinite(on_error) or not 0 <= on_error <= 1:
        raise ValueError(f"on_error={on_error!r}: a fraction lies between 0.0 and 1.0")
    return Budget(None, float(on_error)) if on_error else RAISE
