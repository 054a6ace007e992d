"""Objects that are declared safe for several threads at once: stoker's own, and users'."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any, TypeVar

Anything = TypeVar("Anything")

_declared: dict[int, Any] = {}
"""By ``id``: a weak reference to the object, or the object itself if it takes none."""


def thread_safe(obj: Anything) -> Anything:
    """Declare that several threads may call an object at once; it then runs in threads.

    Without this, Python code of yours runs in the training loop's thread where it is cheap, and in
    worker processes where it is not. Declare what depends on its arguments alone and writes to
    nothing that outlives the call: pure functions, NumPy, Pillow, readers opened in the call. Do
    not declare what keeps a buffer, a cache, an open file or a random generator between calls.

    Args:
        obj: a function, an instance (of a dataset, a tokenizer, a connection), or a class, whose
            instances are then all declared. Classes derived from it are not declared by that.

    Returns:
        ``obj`` itself, so this can also be used as a decorator.

    Example:
        >>> @stoker.thread_safe
        ... def halve(image):
        ...     return image[::2, ::2]
    """
    try:
        key = id(obj)
        _declared[key] = weakref.ref(obj, lambda _: _declared.pop(key, None))
    except TypeError:
        _declared[id(obj)] = obj
    return obj


def is_thread_safe(obj: Any) -> bool:
    """True if an object, its class, or the function behind a method or partial is declared."""
    while not (_holds(obj) or _holds(type(obj))):
        if isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, types.MethodType):
            obj = obj.__func__ if _holds(obj.__func__) else obj.__self__
        else:
            return False
    return True


def _holds(obj: Any) -> bool:
    known = _declared.get(id(obj))
    return known is not None and (
        known is obj or (isinstance(known, weakref.ref) and known() is obj)
    )
