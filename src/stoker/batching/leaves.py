"""The rows of one leaf of a batch: an array, a tensor, numbers of one dtype, or a list."""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Allocator
from stoker.batching.stacking import write_rows
from stoker.errors import UnlikeError

_form = operator.attrgetter("shape", "dtype")
_TEXT = (str, bytes, type(None))  # NumPy's own strings included
_KINDS = "biufc"
_MOST = np.iinfo(np.int64).max
_NUMBERS = {kind: np.asarray(kind()).dtype for kind in (bool, int, float, complex)}


class LeafName(NamedTuple):
    """A leaf's name, for errors; computed when one is raised."""

    template: Any
    place: int

    def __str__(self) -> str:
        return repr(pytree.leaf_names(self.template)[self.place] or "the example")


class Leaf(ABC):
    """The rows of one leaf, in ``out``."""

    def __init__(self, name: LeafName, out: Any) -> None:
        self.name = name
        self.out = out

    @abstractmethod
    def put(self, start: int, column: Any) -> None:
        """Write rows ``start ..``. Raises UnlikeError where they do not fit."""

    def column(self) -> Any:
        """Return the rows for ``Builder.put_columns`` of another process."""
        return self.out

    def finish(self, tensors: bool) -> Any:
        out = self.column()
        if tensors and isinstance(out, np.ndarray):
            import torch

            return torch.from_numpy(pytree.native(out))
        return out

    def text(self, value: Any) -> str:
        """Describe a value's type for an error."""
        if pytree.is_tensor(value) and pytree.is_sparse(value):
            return f"{value.layout} {list(value.shape)}"
        return str(value.dtype) if isinstance(value, np.generic) else type(value).__name__

    def unlike(self, column: Any, fits: Callable[[Any], bool], usual: Any) -> UnlikeError:
        """Return the error of a column with misfits; ``usual`` is a value of earlier rows."""
        odd = next(value for value in column if not fits(value))
        kinds = list(dict.fromkeys(self.text(value) for value in [odd, *column, usual]))
        if len(kinds) == 1:
            kinds.append("another in rows before")
        text = ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")
        way = "make the examples alike in a map (resize, crop, pad)"
        if type(None).__name__ in kinds:
            way = "leave such examples out with .filter(), put a value in place of None in a map"
        return UnlikeError(
            f"{self.name} differs within a batch: {text}; {way}, or give .batch(collate=...)"
        )


class DenseLeaf(Leaf):
    """Arrays, or tensors, of one shape and dtype."""

    def __init__(self, name: LeafName, first: Any, out: Any) -> None:
        super().__init__(name, out)
        self._shape, self._dtype = first.shape, first.dtype

    @staticmethod
    @abstractmethod
    def is_one(value: Any) -> bool: ...

    @abstractmethod
    def stack(self, column: Any, rows: Any) -> None:
        """Write fitting values into rows."""

    def put(self, start: int, column: Any) -> None:
        shape, dtype, is_one = self._shape, self._dtype, self.is_one
        rows = self.out[start : start + len(column)]
        if is_one(column):  # already stacked
            if column.shape[1:] != shape or column.dtype != dtype:
                raise self.unlike([column[0]], self._fits, self.out[0])
            rows[...] = column
            return
        alike = all(map(is_one, column)) and [*map(_form, column)] == [(shape, dtype)] * len(column)
        if not alike:
            raise self.unlike(column, self._fits, self.out[0])
        self.stack(column, rows)

    def _fits(self, value: Any) -> bool:
        return self.is_one(value) and _form(value) == (self._shape, self._dtype)

    def text(self, value: Any) -> str:
        return f"{value.dtype} {list(value.shape)}" if self.is_one(value) else super().text(value)


class ArrayLeaf(DenseLeaf):
    @staticmethod
    def is_one(value: Any) -> bool:
        return isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)

    def stack(self, column: Any, rows: Any) -> None:
        write_rows(column, rows)


class JaxLeaf(ArrayLeaf):
    """Arrays of JAX; the batch is an array of NumPy."""

    def put(self, start: int, column: Any) -> None:
        if not isinstance(column, np.ndarray):
            column = [np.asarray(v) if pytree.is_jax_array(v) else v for v in column]
        super().put(start, column)


class TensorLeaf(DenseLeaf):
    @staticmethod
    def is_one(value: Any) -> bool:
        return pytree.is_tensor(value) and not pytree.is_sparse(value)

    def put(self, start: int, column: Any) -> None:
        if not self.is_one(column) and not all(map(self._is_here, column)):
            raise self.unlike(column, self._is_here, self.out[0])
        super().put(start, column)

    def _is_here(self, value: Any) -> bool:
        return not self.is_one(value) or value.device == self.out.device

    def stack(self, column: Any, rows: Any) -> None:
        import torch

        with torch.no_grad():
            torch.stack(list(column), out=rows)

    def text(self, value: Any) -> str:
        where = f" on {value.device}" if self.is_one(value) and value.device.type != "cpu" else ""
        return super().text(value) + where


class SparseLeaf(DenseLeaf):
    """Sparse tensors, which are stacked at the end: torch writes them into no rows."""

    @staticmethod
    def is_one(value: Any) -> bool:
        return pytree.is_tensor(value) and pytree.is_sparse(value)

    def __init__(self, name: LeafName, first: Any, rows: int) -> None:
        super().__init__(name, first, [first] * rows)

    def stack(self, column: Any, rows: Any) -> None:
        raise AssertionError

    def put(self, start: int, column: Any) -> None:
        if not all(map(self._fits, column)):
            raise self.unlike(column, self._fits, self.out[0])
        self.out[start : start + len(column)] = [value.detach().clone() for value in column]

    def finish(self, tensors: bool) -> Any:
        import torch

        with torch.no_grad():
            return torch.stack(self.out)


class NumberLeaf(Leaf):
    """Numbers; their common dtype is known once all rows are there."""

    def __init__(self, name: LeafName, first: Any) -> None:
        super().__init__(name, None)
        self._first = first
        self._pieces: dict[int, NDArray[Any]] = {}

    def put(self, start: int, column: Any) -> None:
        if isinstance(column, np.ndarray):
            if column.dtype.kind not in _KINDS or column.ndim > 1:
                raise self.unlike([column[0]], _is_number, self._first)
            self._pieces[start] = column.copy()
            return
        if not all(map(_is_number, column)):
            raise self.unlike(column, _is_number, self._first)
        kinds, first = {*map(type, column)}, column[0]
        with contextlib.suppress(OverflowError):
            if len(kinds) == 1 and (type(first) in _NUMBERS or isinstance(first, np.generic)):
                dtype = _NUMBERS.get(type(first)) or first.dtype
                self._pieces[start] = np.array(list(column), dtype)
                return
        self._pieces.update(enumerate((np.asarray(value)[None] for value in column), start))

    def column(self) -> NDArray[Any]:
        """Return the numbers in their dtype; if they have several, as int64, float64 or complex128.

        So the result does not depend on the pieces. Raises UnlikeError for too large integers.
        """
        pieces = [self._pieces[start] for start in sorted(self._pieces)]
        dtypes = {piece.dtype for piece in pieces}
        if len(dtypes) == 1 and not pieces[0].dtype.hasobject:
            return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        kind = max((dtype.kind for dtype in dtypes), key="biuOfc".index)
        row = 0
        for piece in pieces:
            large = [n > _MOST if piece.dtype.kind in "uO" else False for n in piece.tolist()]
            if kind in "biuO" and (True in large or piece.dtype.hasobject):
                raise UnlikeError(
                    f"{self.name} has whole numbers that no one dtype can hold: make them floats "
                    "in a map, or give .batch(collate=...)",
                    row + (large.index(True) if True in large else 0),
                )
            row += len(piece)
        wide = {"f": np.float64, "c": np.complex128}.get(kind, np.int64)
        return np.concatenate(pieces, dtype=wide, casting="unsafe")


class ScalarLeaf(Leaf):
    """Other scalars of NumPy: times and structured values, of one dtype."""

    def __init__(self, name: LeafName, first: Any, rows: int) -> None:
        super().__init__(name, np.empty(rows, first.dtype))
        self._first = first

    def put(self, start: int, column: Any) -> None:
        if isinstance(column, np.ndarray):
            if column.dtype != self.out.dtype:
                raise self.unlike([column[0]], self._fits, self._first)
        elif not all(map(self._fits, column)):
            raise self.unlike(column, self._fits, self._first)
        else:
            column = list(column)  # NumPy takes a tuple for one structured value
        self.out[start : start + len(column)] = column

    def _fits(self, value: Any) -> bool:
        return isinstance(value, np.generic) and value.dtype == self.out.dtype


class ListLeaf(Leaf):
    """Strings, bytes and None stay a list."""

    _kind: type[str] | type[bytes] | None = None

    def put(self, start: int, column: Any) -> None:
        for row, value in enumerate(column, start):
            if value is None:
                continue
            kind = str if isinstance(value, str) else bytes if isinstance(value, bytes) else None
            self._kind = self._kind or kind
            if kind is None or kind is not self._kind:
                raise self.unlike(column, self._fits, self._kind and self._kind())
            self.out[row] = kind(value)  # NumPy's own strings become plain ones

    def _fits(self, value: Any) -> bool:
        return value is None or (self._kind is not None and isinstance(value, self._kind))


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float, complex)):
        return True
    is_one = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
    return is_one and value.dtype.kind in _KINDS and value.dtype.isnative


def make_leaf(name: LeafName, first: Any, rows: int, allocator: Allocator) -> Leaf:
    if _is_number(first):
        return NumberLeaf(name, first)
    if isinstance(first, np.ma.MaskedArray):
        raise UnlikeError(
            f"{name} is a MaskedArray, whose masked values would come like any others: return "
            ".filled(value) in a map, or values and mask as two fields"
        )
    if isinstance(first, np.ndarray):
        return ArrayLeaf(name, first, allocator.array((rows, *first.shape), first.dtype))
    if isinstance(first, _TEXT):
        return ListLeaf(name, [None] * rows)
    if isinstance(first, np.generic):
        return ScalarLeaf(name, first, rows)
    if pytree.is_jax_array(first):  # stacked on the host: JAX would dispatch each example
        first = np.asarray(first)
        return JaxLeaf(name, first, allocator.array((rows, *first.shape), first.dtype))
    if pytree.is_tensor(first):
        import torch

        if first.layout == torch.sparse_coo:
            return SparseLeaf(name, first, rows)
        if pytree.is_sparse(first):
            raise UnlikeError(
                f"{name} is a tensor of {first.layout}, and torch stacks sparse tensors only as "
                "sparse_coo: convert it in a map (.to_sparse_coo()), or give .batch(collate=...)"
            )
        # In any thread's mode: a tensor of inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            out = torch.empty((rows, *first.shape), dtype=first.dtype, device=first.device)
        return TensorLeaf(name, first, out)
    raise UnlikeError(
        f"{name} is of type {type(first).__name__}, which cannot be stacked; turn it into an "
        "array in a map, or give .batch(collate=...)"
    )
