"""``max_errors=``: the number of bad examples that a run may skip before it stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.basics.resources import parse_share
from stoker.basics.validate import is_whole_number

LEAST_SEEN = 1_000
"""If the length of an epoch is not known, a fraction is taken of at least so many examples: else
the first failure would already be 100 %."""

MaxErrors = int | str
"""How many examples of an epoch may be skipped: a number, or a share as text such as ``"1%"``."""


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
        return (
            f"{100 * self.fraction:.3g}% of the examples" if self.fraction < 1 else "all examples"
        )


# The default: no example may be skipped.
RAISE = Budget(0)


def budget_of(max_errors: Any) -> Budget:
    """Read ``max_errors=``. Raises TypeError or ValueError for anything else than it takes."""
    if is_whole_number(max_errors):
        if max_errors < 0:
            raise ValueError(f"max_errors= cannot skip {max_errors} examples")
        return Budget(int(max_errors))
    says = (
        "max_errors= is how many examples may be skipped in an epoch: a number such as 100, or a "
        f'share as text such as "1%"; not {max_errors!r}'
    )
    if not isinstance(max_errors, str):
        raise TypeError(says)
    fraction = parse_share(max_errors)
    if fraction is None:
        raise ValueError(says)
    return Budget(None, fraction) if fraction else RAISE
