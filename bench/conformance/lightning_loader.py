"""A plugin of pytest: Lightning's test of loops resumes a pipeline instead of its own iterable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import stoker


def numbers(start: int = 0) -> stoker.Pipeline[int]:
    """Return what ``StatefulIterable(start)`` is there: the numbers up to 9, with a state."""
    return stoker.from_dataset(range(start, 10), seed=0)


def pytest_collection_modifyitems(items: Sequence[Any]) -> None:
    for item in items:
        item.module.StatefulIterable = numbers
