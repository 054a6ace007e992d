"""What arguments are: ``True`` is no number, NumPy's whole numbers are."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a whole number: of Python or NumPy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a real number: of Python or NumPy, and not a bool."""
    return is_whole_number(value) or isinstance(value, (float, np.floating))
