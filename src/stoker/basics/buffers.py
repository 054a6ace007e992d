"""Recycled memory for batches, and the declaration of functions that only read their arguments.

A new array of a megabyte costs page faults, often more than filling it. So arrays of 64 KiB or more
take their memory from a free list. The memory returns when the last reference to the array, or to a
view of it, is gone: a weak reference notices that. A consumer may keep a batch as long as it likes,
and only then pays for a new array. There is no reference counting and no explicit release, and no
lock, since a finalizer may run in any thread at any moment. Nor does the finalizer run Python code:
a Ctrl-C that came in it would be lost.

A pool uses its items again, so no function may write to them. No flag of an array prevents that
(torch and ctypes write through read-only ones), so only functions that are declared with
`reads_only` get the item itself. Their result may still be, or contain, a view of the item; such
parts are copied before another function gets them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.basics import pytree

# The smallest array that is recycled: allocating a smaller one is cheaper than a finalizer. A copy
# of 600 KB took 0.48 ms in new memory, nearly all of it page faults.
_MIN_RECYCLED_BYTES = 1 << 16
# Arrays begin at multiples of 64 bytes: a cache line, and the widest vector register (AVX-512).
_ALIGNMENT = 64
# The number of sizes for which free memory is kept. A batch has a few arrays; with more sizes, free
# memory of one is seldom used again. Chosen, not measured.
_MAX_SIZES = 8


class Allocator(Protocol):
    """Allocates arrays for batches."""

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised C-ordered array."""
        ...


class Recycler:
    """A free list of memory, by size. Safe to use from any thread, and from finalizers.

    ``spare`` free pieces of one size are kept, or more if they have no more than ``spare_bytes``
    together; ``rest`` keeps at most ``resting_bytes`` in all.
    """

    def __init__(
        self,
        spare: int = 4,
        allocate: Callable[[int], memoryview] | None = None,
        spare_bytes: int = 0,
        resting_bytes: int | None = None,
    ) -> None:
        self.spare = spare
        self._spare_bytes = spare_bytes
        self._resting_bytes = resting_bytes
        self._allocate = allocate or allocate_aligned
        self._free: dict[int, deque[_Lent]] = {}

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if size < _MIN_RECYCLED_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        free = self._free.get(size)
        if free is None:
            if len(self._free) >= _MAX_SIZES:
                for oldest in list(self._free)[:1]:  # in one step, as other threads change it
                    self._free.pop(oldest, None)
            spare = max(self.spare, self._spare_bytes // size)
            free = self._free.setdefault(size, deque(maxlen=spare))
        try:
            raw = free.pop().raw
        except IndexError:
            raw = self._allocate(size)
        # The base of this array is a _Block, another type. A view's base is the last array of the
        # view's own type, so all views refer to this array: when it is freed, there is no view.
        block = _Block((size,), np.uint8, raw)
        array: NDArray[Any] = np.ndarray(shape, dtype, buffer=block)
        block.lent = _Lent(array, free.append)
        block.lent.raw = raw
        return array

    def copy(self, value: Any) -> Any:
        """Return a deep copy of a structure, its NumPy arrays in recycled memory."""
        copy: Any = pytree.map_leaves(self._copy_leaf, value, pytree.PLAIN)
        return copy

    def rest(self) -> None:
        """Free memory beyond ``resting_bytes``, until arrays are wanted again."""
        room = self._resting_bytes
        if room is None:
            return
        for size, free in list(self._free.items()):
            keep = min(len(free), room // size)
            if size > room:
                self._free.pop(size, None)  # what comes back later goes with the last of its size
            room -= keep * size
            with contextlib.suppress(IndexError):  # a thread that does not end may take some, too
                while len(free) > keep:
                    free.pop()

    def clear(self) -> None:
        """Free the kept memory, and keep none of later arrays."""
        self.spare = self._spare_bytes = 0
        self._free.clear()

    def held_bytes(self) -> int:
        return sum(size * len(free) for size, free in list(self._free.items()))

    def _copy_leaf(self, leaf: Any) -> Any:
        if type(leaf) is np.ndarray and not leaf.dtype.hasobject:
            out = self.array(leaf.shape, leaf.dtype)
            np.copyto(out, leaf)
            return out
        if pytree.is_tensor(leaf) and _is_like_array(leaf):
            import torch

            return torch.from_numpy(self._copy_leaf(leaf.detach().numpy()))
        return pytree.deep_copy(leaf)


class _Lent(weakref.ref[Any]):
    """A reference to an array, and its memory: in the free list once the array is gone."""

    __slots__ = ("raw",)

    raw: memoryview


def _is_like_array(tensor: Any) -> bool:
    """True if a tensor is large, and lies in memory like a usual NumPy array."""
    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.nbytes >= _MIN_RECYCLED_BYTES
        and tensor.dtype in (torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64)
        and tensor.is_contiguous()
        and not tensor.is_neg()  # no lazy negation: the memory holds the values
        and not tensor.is_pinned()
    )


class _Block(np.ndarray[Any, Any]):
    """Memory. It is a subclass so that NumPy does not take it for the base of views."""

    lent: _Lent


def allocate_aligned(size: int) -> memoryview:
    """Return new memory of the process, which begins at a multiple of 64 bytes."""
    block = _Block(
        (size + _ALIGNMENT,), np.uint8
    )  # owns its memory, so it is not a view of a plain array
    start = -block.ctypes.data % _ALIGNMENT
    return block.data[start : start + size]


AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])
Place = tuple[int, int]
"""The addresses at which memory begins and ends."""


def reads_only(fn: AnyCallable) -> AnyCallable:
    """Declare that a function never changes its argument, and keeps no reference to it.

    Behind an ``.echo()``, ``.map()``, ``.random_map()`` and ``.filter()`` then give the function
    the pool's item itself; any other function gets a copy. The stream is the same either way.
    stoker's own image functions are declared, and so is a ``functools.partial`` of a declared
    function.

    The result may be, or contain, the argument, parts of it, and views of its arrays and tensors:
    stoker copies these before another function may write to them, each array by itself. Objects of
    the argument's own classes must not be inside other objects of the result.

    Example: ``pipeline.echo(3).map(stoker.reads_only(crop))``, or ``@stoker.reads_only``.

    Args:
        fn: a function, a class whose instances are called, or such an instance. A wrapper that
            ``functools.wraps`` makes of a declared function is not declared.

    Returns:
        ``fn`` itself, marked.

    Raises:
        TypeError: ``fn`` cannot be called, or cannot be marked (some built-in functions: wrap
            them).
    """
    if not callable(fn):
        raise TypeError(f"reads_only needs a function, not a {type(fn).__name__}")
    try:
        fn._only_reads = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise TypeError(
            f"reads_only cannot mark {fn!r}: call it in a function of your own, and mark that one"
        ) from None
    return fn


def only_reads(fn: Any) -> bool:
    while not _is_marked(fn) and isinstance(fn, functools.partial):
        fn = fn.func
    inner = getattr(fn, "__wrapped__", None)  # functools.wraps copies marks along with names
    return _is_marked(fn) and not _is_marked(inner)


def _is_marked(fn: Any) -> bool:
    return getattr(fn, "_only_reads", None) is True


def copy_lent_parts(made: Any, lent: Any, copy: Callable[[Any], Any]) -> Any:
    """Return the result of declared functions, with copies of parts that belong to the argument.

    ``lent`` is the structure that the first function got; ``copy`` makes a deep copy of one leaf.
    """
    leaves = [leaf for leaf in pytree.leaves(lent) if not pytree.is_immutable(leaf)]
    same = {id(leaf) for leaf in leaves}
    places = [_place(leaf) for leaf in leaves]

    def separate(leaf: Any) -> Any:
        return copy(leaf) if id(leaf) in same or _may_overlap(leaf, places) else leaf

    return pytree.map_leaves(separate, made)


def _may_overlap(leaf: Any, places: list[Place | None]) -> bool:
    """True if an array or tensor may lie in one of these places; None stands for any place."""
    if not isinstance(leaf, np.ndarray) and not pytree.is_tensor(leaf):
        return False
    separate = _place(leaf)
    return any(
        separate is None or other is None or (separate[0] < other[1] and other[0] < separate[1])
        for other in places
    )


def _place(leaf: Any) -> Place | None:
    """Return where an array or a tensor lies; None if its memory may be anywhere."""
    if type(leaf) is np.ndarray and not leaf.dtype.hasobject:
        begin, end = np.lib.array_utils.byte_bounds(leaf)
        return int(begin), int(end)
    if pytree.is_tensor(leaf):
        try:
            storage = leaf.untyped_storage()
            return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a sparse tensor has several storages
            return None
    return None
