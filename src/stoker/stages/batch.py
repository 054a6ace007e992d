"""Batching: examples become the rows of arrays, written where they will be read."""

from __future__ import annotations

import dataclasses
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stoker import pytree
from stoker.buffers import Allocator, Recycler
from stoker.checks import is_whole_number
from stoker.stages.stacking import stacked, write_rows
from stoker.stages.stage import Stage, Traits, first_with

if TYPE_CHECKING:
    from stoker.chain import Chain
    from stoker.engine.lower import Lowering

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Batch(Stage):
    """The stage ``.batch(n)``."""

    n: int
    drop_last: bool
    collate: Collate | None
    traits = Traits(batches=True)

    @staticmethod
    def of(n: Any, drop_last: Any, collate: Any) -> Batch:
        """Check the arguments of ``.batch()``."""
        if not is_whole_number(n):
            raise TypeError(f"a batch size is a whole number, not {n!r}")
        if n < 1:
            raise ValueError(f"a batch has at least one example, not {n}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be a function, not {type(collate).__name__}")
        return Batch(int(n), bool(drop_last), collate)

    @property
    def name(self) -> str:
        return f"batch({self.n})"

    def placed(self, before: Chain) -> Batch:
        """Check that single examples come here, from pools that hold a batch."""
        if before.source.yields_batches:
            raise ValueError("a loader yields batches already: set its batch_size")
        stage = first_with(before.stages, lambda t: t.batches)
        if stage is not None:
            raise ValueError(f".batch({self.n}) cannot follow {stage.name}: batch once")
        for echo in before.echoes:
            echo.check_holds(self.n)
        return self

    def lower(self, to: Lowering) -> None:
        to.batch(self)

    def count(self, items: int) -> int:
        """Return the number of batches that so many examples make."""
        return items // self.n if self.drop_last else -(-items // self.n)

    def outline(self) -> str:
        """Return its size, and what becomes of the rest."""
        return f"batch({self.n}, drop_last={self.drop_last})"


class Columns:
    """A run of examples turned into one column for each leaf; what process workers send."""

    def __init__(self, template: Any, columns: list[Any]) -> None:
        self.template = template
        self.columns = columns

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self.template, self.columns)


class Builder:
    """One batch in the making. Several threads may put rows; the last one calls ``finish``.

    Args:
        rows: the number of examples in this batch.
        collate: the user's collate function, which is then given the list of examples.
        recycler: where arrays come from.
    """

    def __init__(self, rows: int, collate: Collate | None, recycler: Recycler) -> None:
        self._rows = rows
        self._collate = collate
        self._recycler = recycler
        self._examples: list[Any] | None = [None] * rows if collate else None
        self._stacked: Any = None  # a batch that came in one piece
        self._template: Any = None
        self._leaves: list[_Leaf] | None = None
        self._lock = threading.Lock()

    def put(self, start: int, examples: list[Any]) -> None:
        """Write examples as rows ``start ..``; the rows are copied.

        Raises ValueError or TypeError when the examples do not fit together.
        """
        if self._examples is not None:
            self._examples[start : start + len(examples)] = examples
            return
        if 0 < len(examples) == self._rows:
            self._stacked = stacked(examples, self._recycler)
        if examples and self._stacked is None:
            template = self._template if self._leaves else examples[0]
            self._put(start, template, _columns(template, examples))

    def put_columns(self, start: int, made: Columns) -> None:
        """Write columns that another process made, as rows ``start ..``."""
        self._put(start, made.template, made.columns)

    def _put(self, start: int, template: Any, columns: Sequence[Any]) -> None:
        leaves = self._leaves or self._allocate(template, columns)
        if template is not self._template:
            columns = self._in_order(template, columns)
        for leaf, column in zip(leaves, columns, strict=True):
            leaf.put(start, column)

    def _in_order(self, template: Any, columns: Sequence[Any]) -> Sequence[Any]:
        if pytree.signature(template) != pytree.signature(self._template):
            raise _unlike(f"{pytree.outline(self._template)} and {pytree.outline(template)}")
        mine, theirs = map(pytree.leaf_names, (self._template, template))
        return columns if mine == theirs else [columns[theirs.index(name)] for name in mine]

    def finish(self) -> Any:
        """Return the batch."""
        if self._examples is not None:
            assert self._collate is not None
            batch = self._collate(self._examples)
            if batch is None:
                raise TypeError("collate returned None: return the batch")
            return batch
        if self._stacked is not None:
            return self._stacked
        if self._leaves is None:
            raise AssertionError("a batch has at least one row")
        tensors = any(isinstance(leaf, _TensorLeaf) for leaf in self._leaves)
        parts = iter([leaf.finish(tensors) for leaf in self._leaves])
        return pytree.map_leaves(lambda _: next(parts), self._template)

    def _allocate(self, template: Any, columns: Sequence[Any]) -> list[_Leaf]:
        with self._lock:
            if self._leaves is None:
                self._template = template
                self._leaves = [
                    _leaf(_Name(template, place), column[0], self._rows, self._recycler)
                    for place, column in enumerate(columns)
                ]
            return self._leaves


def collated(examples: list[Any], allocator: Allocator) -> Columns:
    """Turn examples into columns whose arrays are stacked (shapes are checked)."""
    template = examples[0]
    stacked = []
    for place, column in enumerate(_columns(template, examples)):
        leaf = _leaf(_Name(template, place), column[0], len(examples), allocator)
        leaf.put(0, column)
        stacked.append(leaf.finish(False))
    return Columns(pytree.map_leaves(lambda _: None, template), stacked)


def _columns(template: Any, examples: Sequence[Any]) -> list[Any]:
    """Transpose examples into one sequence for each leaf of the template.

    Raises TypeError when an example differs from it in more than its leaves.
    """
    parts = pytree.children(template)
    if parts is None:
        return [examples]  # a node where a leaf should be is refused by the leaf
    names = [name for name, _ in parts]
    columns = _transposed(template, names, examples)
    if columns is not None:
        pairs = zip(parts, columns, strict=True)
        return [leaf for (_, child), column in pairs for leaf in _columns(child, column)]
    try:
        rows = [pytree.leaves_like(template, example) for example in examples]
    except TypeError as error:
        raise _unlike(str(error)) from None
    return list(zip(*rows, strict=True))


def _transposed(
    template: Any, names: Sequence[str], examples: Sequence[Any]
) -> Sequence[Sequence[Any]] | None:
    """Return a sequence for each child of a node, or None where that takes a closer look."""
    kind, width = type(template), len(names)
    if width == 0 or {*map(type, examples)} != {kind}:
        return None
    if isinstance(template, (tuple, list)):
        return list(zip(*examples, strict=True)) if {*map(len, examples)} == {width} else None
    if kind is dict:
        if {*map(len, examples)} != {width}:
            return None
        try:
            return [[*map(operator.itemgetter(key), examples)] for key in template]
        except KeyError:
            return None
    if dataclasses.is_dataclass(template):
        return [[*map(operator.attrgetter(name), examples)] for name in names]
    return None


def _unlike(what: str) -> TypeError:
    return TypeError(
        f"examples of one batch differ in structure: {what}; make them alike in a map, or give "
        ".batch(collate=...)"
    )


class _Name(NamedTuple):
    """A leaf's name, for errors: it is put together when one is raised."""

    template: Any
    place: int

    def __str__(self) -> str:
        return repr(pytree.leaf_names(self.template)[self.place] or "the example")


_form = operator.attrgetter("shape", "dtype")
_TEXT = (str, bytes, type(None))  # NumPy's own strings included


class _Leaf(ABC):
    """The rows of one leaf, in ``out``."""

    def __init__(self, name: _Name, out: Any) -> None:
        self.name = name
        self.out = out

    @abstractmethod
    def put(self, start: int, column: Any) -> None:
        """Write rows ``start ..``. Raises ValueError where they do not fit."""

    def finish(self, tensors: bool) -> Any:
        if tensors and isinstance(self.out, np.ndarray):
            import torch

            return torch.from_numpy(pytree.native(self.out))
        return self.out

    def text(self, value: Any) -> str:
        """Say of what kind a value is."""
        return str(value.dtype) if isinstance(value, np.generic) else type(value).__name__

    def ragged(self, column: Any) -> Exception:
        seen = list(dict.fromkeys(self.text(value) for value in column))
        if len(seen) == 1:
            seen.append("another in rows before")
        shown = ", ".join(seen[:4]) + (", ..." if len(seen) > 4 else "")
        return ValueError(
            f"{self.name} differs within a batch: {shown}; make the examples alike in a map "
            "(resize, crop, pad), or give .batch(collate=...)"
        )


class _DenseLeaf(_Leaf):
    """Arrays, or tensors, of one shape and dtype."""

    def __init__(self, name: _Name, first: Any, out: Any) -> None:
        super().__init__(name, out)
        self._shape, self._dtype = first.shape, first.dtype

    @staticmethod
    @abstractmethod
    def is_one(value: Any) -> bool: ...

    @abstractmethod
    def stack(self, column: Any, rows: Any) -> None:
        """Write single values, which fit, into rows."""

    def put(self, start: int, column: Any) -> None:
        shape, dtype, is_one = self._shape, self._dtype, self.is_one
        rows = self.out[start : start + len(column)]
        if is_one(column):  # already stacked
            if column.shape[1:] != shape or column.dtype != dtype:
                raise self.ragged([column[0], self.out[0]])
            rows[...] = column
            return
        alike = all(map(is_one, column)) and [*map(_form, column)] == [(shape, dtype)] * len(column)
        if not alike:
            raise self.ragged([*column, self.out[0]])
        self.stack(column, rows)

    def text(self, value: Any) -> str:
        return f"{value.dtype} {list(value.shape)}" if self.is_one(value) else type(value).__name__


class _ArrayLeaf(_DenseLeaf):
    @staticmethod
    def is_one(value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def stack(self, column: Any, rows: Any) -> None:
        write_rows(column, rows)


class _JaxLeaf(_ArrayLeaf):
    """Arrays of JAX, which become one of NumPy."""

    def put(self, start: int, column: Any) -> None:
        if not isinstance(column, np.ndarray):
            column = [np.asarray(v) if pytree.is_jax_array(v) else v for v in column]
        super().put(start, column)


class _TensorLeaf(_DenseLeaf):
    is_one = staticmethod(pytree.is_tensor)

    def stack(self, column: Any, rows: Any) -> None:
        import torch

        with torch.no_grad():
            torch.stack(list(column), out=rows)


class _ScalarLeaf(_Leaf):
    def __init__(self, name: _Name, first: Any, rows: int) -> None:
        super().__init__(name, np.empty(rows, np.asarray(first).dtype))
        self._kind = type(first)
        self._first = first

    def put(self, start: int, column: Any) -> None:
        dtype = self.out.dtype
        if isinstance(column, np.ndarray):
            if column.dtype != dtype:
                raise self.ragged([column[0], self.out[0]])
        elif {*map(type, column)} != {self._kind} or (
            issubclass(self._kind, np.generic) and any(v.dtype != dtype for v in column)
        ):
            raise self.ragged([*column, self._first])
        else:
            column = list(column)  # NumPy takes a tuple for one structured value
        self.out[start : start + len(column)] = column


class _ListLeaf(_Leaf):
    """Strings, bytes and None stay a list."""

    _kind: type[str] | type[bytes] | None = None

    def put(self, start: int, column: Any) -> None:
        for row, value in enumerate(column, start):
            if value is None:
                continue
            kind = str if isinstance(value, str) else bytes if isinstance(value, bytes) else None
            self._kind = self._kind or kind
            if kind is None or kind is not self._kind:
                raise self.ragged([*column, self._kind and self._kind()])
            self.out[row] = kind(value)  # NumPy's own strings become plain ones


def _leaf(name: _Name, first: Any, rows: int, allocator: Allocator) -> _Leaf:
    if isinstance(first, np.ndarray):
        return _ArrayLeaf(name, first, allocator.array((rows, *first.shape), first.dtype))
    if isinstance(first, _TEXT):
        return _ListLeaf(name, [None] * rows)
    if isinstance(first, (bool, int, float, complex, np.generic)):
        return _ScalarLeaf(name, first, rows)
    if pytree.is_jax_array(first):  # stacked on the host: JAX would dispatch each example
        first = np.asarray(first)
        return _JaxLeaf(name, first, allocator.array((rows, *first.shape), first.dtype))
    if pytree.is_tensor(first):
        import torch

        # In any thread's mode: a tensor of inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            out = torch.empty((rows, *first.shape), dtype=first.dtype, device=first.device)
        return _TensorLeaf(name, first, out)
    raise TypeError(
        f"{name} is a {type(first).__name__}, which cannot be stacked; turn it into an array "
        "in a map, or give .batch(collate=...)"
    )
