"""Checks of arguments. NumPy's numbers count as numbers; ``True`` does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np


def is_whole_number(value: Any) -> TypeGuard[int]:
    """True if ``value`` is a whole number of Python or NumPy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """True if ``value`` is a real number of Python or NumPy, and not a bool."""
    return is_whole_number(value) or isinstance(value, (float, np.floating))


def whole_from(least: int, value: Any, what: str) -> int:
    """Return a whole number from ``least`` on. Raises ValueError; ``what`` begins its text."""
    if not is_whole_number(value) or value < least:
        raise ValueError(f"{what} a whole number from {least}, not {value!r}")
    return int(value)


def names_in(argument: str, value: Any, example: str) -> tuple[str, ...]:
    """Return the names in a user's list: one or more, none twice. Raises TypeError, ValueError."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{argument} must be a list of names such as {example}, not {value!r}")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{argument} must be a list of names such as {example}, but {name!r} is in it"
            )
        if names.count(name) > 1:
            raise ValueError(f"{argument} has {name!r} twice")
    if not names:
        raise ValueError(f"{argument} must be a list of names such as {example}, not an empty one")
    return names
