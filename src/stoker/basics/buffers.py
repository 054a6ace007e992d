"""Batch arrays that are used again once nobody refers to them, and functions that only read what
they are given.

A new array of a megabyte costs its page faults, often more than filling it. An array from
here returns when the last reference to it or to a view of it is gone, by a finaliser, so a
consumer may keep a batch as long as it likes and pays with a new array only then.

Arrays of 64 KiB or more sit on memory from a free list, and a weak reference brings the memory
back. There is no reference counting, and no explicit release. There is no lock either: a finalizer
may run in any thread at any moment.

A pool's item is used again, so nothing may write into it. No flag of an array holds that up (torch
and ctypes write through read-only ones), so functions are lent to by declaration alone. What they
return may still be a view of the item, or have parts of it: before anything else gets hold of it,
those are copied.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.basics import pytree

# Below, allocating is cheaper than a finaliser. A copy of 600 KB cost 0.48 ms in new memory, nearly
# all of it page faults.
_RECYCLED_FROM_BYTES = 1 << 16
# Of arrays: a cache line, and enough for all vector instructions.
_ALIGNMENT = 64
# Sizes that free pieces are kept of: a batch has a few leaves; with more, they are of no use to one
# another.
_SIZES = 8


class Allocator(Protocol):
    """What arrays of batches come from."""

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised C-ordered array."""
        ...


class Recycler:
    """A free list of memory, by size. Safe to use from any thread, and from finalisers.

    Args:
        spare: how many free pieces of one size are kept.
        allocate: where memory comes from: called with a number of bytes.
    """

    def __init__(self, spare: int = 4, allocate: Callable[[int], memoryview] | None = None) -> None:
        self.spare = spare
        self._allocate = allocate or _aligned
        self._free: dict[int, deque[memoryview]] = {}
        self._live: dict[int, tuple[weakref.ref[Any], memoryview]] = {}

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised C-ordered array."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if size < _RECYCLED_FROM_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        free = self._free.get(size)
        if free is None:
            if len(self._free) >= _SIZES:
                self._free.pop(next(iter(self._free), 0), None)
            free = self._free.setdefault(size, deque())
        try:
            raw = free.pop()
        except IndexError:
            raw = self._allocate(size)
        # The base of this array is a _Block. NumPy looks for the base of a view among arrays of
        # the view's own type, so it finds this array: when that goes, no view is left.
        array: NDArray[Any] = np.ndarray(shape, dtype, buffer=raw)
        reference = weakref.ref(array, self._returned)
        self._live[id(reference)] = (reference, raw)
        return array

    def copied(self, value: Any) -> Any:
        """Return a deep copy of a structure, its NumPy arrays in recycled memory."""
        copy: Any = pytree.map_leaves(self._copied_leaf, value)
        return copy

    def clear(self) -> None:
        """Free what is kept, and keep nothing any more."""
        self.spare = 0
        self._free.clear()

    def held_bytes(self) -> int:
        """Return the bytes of the free pieces that are kept."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def _copied_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and type(leaf) is np.ndarray and not leaf.dtype.hasobject:
            out = self.array(leaf.shape, leaf.dtype)
            np.copyto(out, leaf)
            return out
        if pytree.is_tensor(leaf) and _is_like_array(leaf):
            import torch

            return torch.from_numpy(self._copied_leaf(leaf.detach().numpy()))
        return pytree.copied(leaf)

    def _returned(self, reference: weakref.ref[Any]) -> None:
        _, raw = self._live.pop(id(reference))
        free = self._free.get(len(raw))
        if free is not None and len(free) < self.spare:
            free.append(raw)


def _is_like_array(tensor: Any) -> bool:
    """Tell whether a tensor is large, and lies in memory as one of NumPy's usual arrays does."""
    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.nbytes >= _RECYCLED_FROM_BYTES
        and tensor.dtype in (torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64)
        and tensor.is_contiguous()
        and not tensor.is_neg()  # its numbers are what it holds
        and not tensor.is_pinned()
    )


class _Block(np.ndarray[Any, Any]):
    """Memory. Of a type of its own, so that NumPy does not take it for the base of views."""


def _aligned(size: int) -> memoryview:
    block = _Block((size + _ALIGNMENT,), np.uint8)  # owns its memory: no view of a plain array
    start = -block.ctypes.data % _ALIGNMENT
    return block.data[start : start + size]


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
