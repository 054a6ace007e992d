"""Returns elements of containers, to judge if they can change; only a few are checked singly."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import numpy as np

from stoker.replicas.thread_safety import ATOMS

_FEW = 10_000  # elements of a global that are looked at one by one, in 30 ms; else it is state
_NESTED = 8  # levels of tuples that are looked through at once; what is nested deeper is state


def elements_of(value: Any) -> list[Any] | None:
    """Return the elements of a container; None if there are too many, or reading it may write."""
    if len(value) > _FEW and not isinstance(value, np.ndarray):
        many = _plain_elements(value)
        return [] if many is not None and _are_fixed(many) else None
    if isinstance(value, defaultdict):
        return None  # reading it writes
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, np.ndarray):
        return list(value.ravel()) if value.dtype.hasobject and value.size <= _FEW else None
    return list(value)


def inner_elements(value: Any) -> list[Any] | None:
    """Return the elements of all containers in a large container, as one list."""
    many = _plain_elements(value)
    kinds = None if many is None else set(map(type, many))
    if many is None or kinds is None or not kinds <= {list, tuple, set, frozenset, dict}:
        return None
    if kinds == {dict}:
        return list(chain.from_iterable(each.values() for each in many))
    return None if dict in kinds else list(chain.from_iterable(many))


def _plain_elements(value: Any) -> Collection[Any] | None:
    if type(value) in (list, tuple, set, frozenset, deque):
        elements: Collection[Any] = value
        return elements
    return value.values() if type(value) is dict else None


def _are_fixed(items: Iterable[Any]) -> bool:
    """True if all items are atoms, or tuples of atoms. It takes 10 to 40 ns an item."""
    for _ in range(_NESTED):
        held = items if isinstance(items, Collection) else list(items)
        kinds = set(map(type, held)) - ATOMS
        if not kinds:
            return True
        if not kinds <= {tuple, frozenset}:
            return False
        items = chain.from_iterable(each for each in held if type(each) in kinds)
    return False
