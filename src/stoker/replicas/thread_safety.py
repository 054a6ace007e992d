"""Objects that users declare to be safe for several threads at once."""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import Any, TypeVar

Anything = TypeVar("Anything")

_declared: dict[int, Any] = {}
"""By ``id``: a weak reference where the object takes one, else the object, which then stays."""


def thread_safe(obj: Anything) -> Anything:
    """Declare that threads may call an object at once: they share it, without copy or lock.

    By default each worker thread calls its own copy of the dataset and of the functions, and what
    cannot be copied is called by one thread at a time. What is declared is used as it is: one
    object for all threads, and what it refers to is shared with it.

    Args:
        obj: a function, an instance (of a dataset, a tokenizer, a connection), or a class, whose
            instances are then all shared. Classes derived from it are not declared by that.

    Returns:
        ``obj`` itself, so this is a decorator, too.
    """
    try:
        key = id(obj)
        _declared[key] = weakref.ref(obj, lambda _: _declared.pop(key, None))
    except TypeError:
        _declared[id(obj)] = obj
    return obj


def is_declared(obj: Any) -> bool:
    """Return whether an object, its class, or the function of a method or partial is declared."""
    return _holds(obj) or _holds(type(obj))


def are_declared(cls: type, keys: Set[int]) -> bool:
    """Return whether a class is declared, or any of its objects with these ``id``."""
    return _holds(cls) or not _declared.keys().isdisjoint(keys)


def _holds(obj: Any) -> bool:
    known = _declared.get(id(obj))
    return known is not None and (
        known is obj or (isinstance(known, weakref.ref) and known() is obj)
    )
