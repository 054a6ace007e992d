"""What arguments are: ``True`` is no number, NumPy's whole numbers are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a whole number: of Python or NumPy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a real number: of Python or NumPy, and not a bool."""
    return is_whole_number(value) or isinstance(value, (float, np.floating))


def names_in(argument: str, given: Any, such_as: str) -> tuple[str, ...]:
    """Return the names in a list that a user gave: at least one, none twice.

    Raises TypeError or ValueError, which show a list ``such_as``.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{argument} is a list of names such as {such_as}, not {given!r}")
    names = tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} is a list of names such as {such_as}; {name!r} is in it")
        if names.count(name) > 1:
            raise ValueError(f"{argument} has {name!r} twice")
    if not names:
        raise ValueError(f"{argument} is a list of names such as {such_as}, not an empty one")
    return names
