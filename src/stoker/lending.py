"""Functions that only read what they are given: a pool lends them its items instead of copying.

A pool's item is used again, so nothing may write into it. No flag of an array holds that up (torch
and ctypes write through read-only ones), so functions are lent to by declaration alone. What they
return may still be a view of the item, or have parts of it: before anything else gets hold of it,
those are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from stoker import pytree

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])
Place = tuple[int, int]
"""Where memory begins and ends."""


def reads_only(fn: AnyCallable) -> AnyCallable:
    """Declare that a function never changes what it is given, and keeps nothing of it.

    Behind an ``.echo()``, ``.map()``, ``.random_map()`` and ``.filter()`` then hand it the pool's
    item itself, where any other function gets a copy. The stream stays the same. stoker's own image
    functions are declared, and so is a ``functools.partial`` of what is declared.

    What it returns may be, or contain, a view of an array or tensor that it was given, and whatever
    else it was given, as it is: stoker copies that before another function may write into it, each
    array by itself. Objects of the caller's own types must not be returned inside of others.

    Args:
        fn: a function, a class whose instances are called, or one such instance. What
            ``functools.wraps`` makes of a declared function is not declared.

    Returns:
        ``fn`` itself, marked; so it is a decorator, too.

    Raises:
        TypeError: it cannot be called, or takes no mark (some built-in ones: wrap them).
    """
    if not callable(fn):
        raise TypeError(f"reads_only takes a function, not {type(fn).__name__}")
    try:
        fn._only_reads = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise TypeError(
            f"reads_only cannot mark {fn!r}: put it into a function of your own, and mark that"
        ) from None
    return fn


def only_reads(fn: Any) -> bool:
    """Return whether a function is declared to change nothing that it is given."""
    while not _is_marked(fn) and isinstance(fn, functools.partial):
        fn = fn.func
    inner = getattr(fn, "__wrapped__", None)  # functools.wraps copies marks along with names
    return _is_marked(fn) and not _is_marked(inner)


def _is_marked(fn: Any) -> bool:
    return getattr(fn, "_only_reads", None) is True


def separated(made: Any, lent: Any, copied: Callable[[Any], Any]) -> Any:
    """Return what was made of a lent value, with copies of what belongs to the latter.

    Args:
        made: a structure, what came of functions that only read.
        lent: the structure that the first of them was given.
        copied: makes a deep copy of one leaf.
    """
    leaves = [leaf for leaf in pytree.leaves(lent) if not pytree.is_immutable(leaf)]
    same = {id(leaf) for leaf in leaves}
    places = [_place(leaf) for leaf in leaves]

    def own(leaf: Any) -> Any:
        return copied(leaf) if id(leaf) in same or _may_overlap(leaf, places) else leaf

    return pytree.map_leaves(own, made)


def _may_overlap(leaf: Any, places: list[Place | None]) -> bool:
    """Return whether an array or tensor may lie in one of these places; None is anywhere."""
    if not isinstance(leaf, np.ndarray) and not pytree.is_tensor(leaf):
        return False
    own = _place(leaf)
    return any(
        own is None or other is None or (own[0] < other[1] and other[0] < own[1])
        for other in places
    )


def _place(leaf: Any) -> Place | None:
    """Return where an array or a tensor lies; None for what may hold memory anywhere."""
    if type(leaf) is np.ndarray and not leaf.dtype.hasobject:
        begin, end = np.lib.array_utils.byte_bounds(leaf)
        return int(begin), int(end)
    if pytree.is_tensor(leaf):
        try:
            storage = leaf.untyped_storage()
            return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse ones have several
            return None
    return None
