"""Batching: examples become the rows of arrays, written where they will be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker import structure
from stoker.buffers import Recycler

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Batch:
    """The stage ``.batch(n)``."""

    n: int
    drop_last: bool
    collate: Collate | None

    @property
    def name(self) -> str:
        """Name the stage for people."""
        return f"batch({self.n})"

    def count(self, examples: int) -> int:
        """Return the number of batches that so many examples make."""
        return examples // self.n if self.drop_last else -(-examples // self.n)


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
        self._template: Any = None
        self._leaves: list[_Leaf] | None = None
        self._lock = threading.Lock()

    def put(self, start: int, examples: list[Any]) -> None:
        """Write examples as rows ``start ..``; the rows are copied.

        Raises ValueError or TypeError when the examples do not fit together.
        """
        if self._examples is not None:
            self._examples[start : start + len(examples)] = examples
        elif examples:
            self.put_columns(start, examples[0], _columns(examples))

    def put_columns(self, start: int, template: Any, columns: Sequence[Any]) -> None:
        """Write columns, one for each leaf of ``template``, as rows ``start ..``."""
        leaves = self._leaves or self._allocate(template, columns)
        if len(leaves) != len(columns) or type(template) is not type(self._template):
            raise TypeError(
                f"examples of one batch differ in structure: {_outline(self._template)} "
                f"and {_outline(template)}; make them alike in a map, or give .batch(collate=...)"
            )
        for leaf, column in zip(leaves, columns, strict=True):
            leaf.put(start, column)

    def finish(self) -> Any:
        """Return the batch."""
        if self._examples is not None:
            assert self._collate is not None
            return self._collate(self._examples)
        if self._leaves is None:
            raise AssertionError("a batch has at least one row")
        tensors = any(isinstance(leaf, _TensorLeaf) for leaf in self._leaves)
        parts = iter([leaf.finish(tensors) for leaf in self._leaves])
        return structure.map_leaves(lambda _: next(parts), self._template)

    def _allocate(self, template: Any, columns: Sequence[Any]) -> list[_Leaf]:
        with self._lock:
            if self._leaves is None:
                names = _leaf_names(template)
                self._template = template
                self._leaves = [
                    _leaf(name, column[0], self._rows, self._recycler)
                    for name, column in zip(names, columns, strict=True)
                ]
            return self._leaves


def collated(examples: list[Any], recycler: Recycler) -> Columns:
    """Turn examples into columns whose arrays are stacked (shapes are checked)."""
    columns = _columns(examples)
    names = _leaf_names(examples[0])
    stacked = []
    for name, column in zip(names, columns, strict=True):
        leaf = _leaf(name, column[0], len(examples), recycler)
        leaf.put(0, column)
        stacked.append(leaf.finish(False))
    return Columns(structure.map_leaves(lambda _: None, examples[0]), stacked)


def _columns(examples: list[Any]) -> list[Any]:
    """Transpose examples into one sequence for each leaf."""
    first = examples[0]
    parts = structure.children(first)
    if parts is None:
        return [examples]
    kind = type(first)
    if any(type(example) is not kind for example in examples):
        other = next(example for example in examples if type(example) is not kind)
        raise TypeError(
            f"examples of one batch differ in structure: {_outline(first)} and {_outline(other)}; "
            "make them alike in a map, or give .batch(collate=...)"
        )
    flat = all(structure.children(child) is None for _, child in parts)
    if flat and isinstance(first, (tuple, list)):
        columns: list[Any] = list(zip(*examples, strict=True)) if _same_length(examples) else []
    elif flat and isinstance(first, Mapping):
        columns = [[example[key] for example in examples] for key in first]
    else:
        rows = [structure.leaves(example) for example in examples]
        columns = list(zip(*rows, strict=True)) if _same_length(rows) else []
    if not columns and parts:
        raise TypeError(
            "examples of one batch differ in their number of parts; make them alike in a map, "
            "or give .batch(collate=...)"
        )
    return columns


def _same_length(rows: Sequence[Any]) -> bool:
    return len({len(row) for row in rows}) == 1


def _leaf_names(template: Any, prefix: str = "") -> list[str]:
    parts = structure.children(template)
    if parts is None:
        return [prefix or "the example"]
    return [
        leaf for n, child in parts for leaf in _leaf_names(child, f"{prefix}.{n}" if prefix else n)
    ]


def _outline(value: Any) -> str:
    parts = structure.children(value)
    if parts is None:
        return type(value).__name__
    return f"{type(value).__name__}({', '.join(name for name, _ in parts)})"


class _Leaf:
    """The rows of one leaf."""

    def __init__(self, name: str) -> None:
        self.name = name

    def put(self, start: int, column: Any) -> None:
        raise AssertionError

    def finish(self, tensors: bool) -> Any:
        raise AssertionError

    def ragged(self, column: Any, describe: Callable[[Any], str]) -> Exception:
        seen = list(dict.fromkeys(describe(value) for value in column))
        if len(seen) == 1:
            seen.insert(0, "others before")
        shown = ", ".join(seen[:4]) + (", ..." if len(seen) > 4 else "")
        return ValueError(
            f"{self.name!r} differs within a batch: {shown}; make the examples alike in a map "
            "(resize, crop, pad), or give .batch(collate=...)"
        )


class _ArrayLeaf(_Leaf):
    def __init__(self, name: str, first: NDArray[Any], rows: int, recycler: Recycler) -> None:
        super().__init__(name)
        self._shape, self._dtype = first.shape, first.dtype
        self._out = recycler.array((rows, *first.shape), first.dtype)

    def put(self, start: int, column: Any) -> None:
        shape, dtype, out = self._shape, self._dtype, self._out
        if isinstance(column, np.ndarray):  # already stacked
            if column.shape[1:] != shape or column.dtype != dtype:
                raise self.ragged([column[0], out[0]], _array_text)
            out[start : start + len(column)] = column
            return
        for value in column:
            if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
                raise self.ragged([*column, out[0]], _array_text)
        rows = out[start : start + len(column)]
        if shape and shape[0] and rows.flags.c_contiguous:
            # Joining along the first axis writes what stacking would, without n new views.
            np.concatenate(column, out=rows.reshape(-1, *shape[1:]))
        else:
            for i, value in enumerate(column):
                rows[i] = value

    def finish(self, tensors: bool) -> Any:
        return _as_tensor(self._out) if tensors else self._out


class _ScalarLeaf(_Leaf):
    def __init__(self, name: str, first: Any, rows: int) -> None:
        super().__init__(name)
        self._kind = type(first)
        self._out = np.empty(rows, np.asarray(first).dtype)

    def put(self, start: int, column: Any) -> None:
        if isinstance(column, np.ndarray):
            if column.dtype != self._out.dtype:
                raise self.ragged([column[0], self._out[0]], lambda v: type(v).__name__)
        elif any(type(value) is not self._kind for value in column):
            raise self.ragged([*column, self._kind()], lambda v: type(v).__name__)
        self._out[start : start + len(column)] = column

    def finish(self, tensors: bool) -> Any:
        return _as_tensor(self._out) if tensors else self._out


class _ListLeaf(_Leaf):
    """Strings, bytes and None stay a list."""

    def __init__(self, name: str, rows: int) -> None:
        super().__init__(name)
        self._out: list[Any] = [None] * rows

    def put(self, start: int, column: Any) -> None:
        self._out[start : start + len(column)] = column

    def finish(self, tensors: bool) -> Any:
        return self._out


class _TensorLeaf(_Leaf):
    def __init__(self, name: str, first: Any, rows: int) -> None:
        import torch

        super().__init__(name)
        self._shape, self._dtype = first.shape, first.dtype
        self._out = torch.empty((rows, *first.shape), dtype=first.dtype, device=first.device)

    def put(self, start: int, column: Any) -> None:
        import torch

        rows = self._out[start : start + len(column)]
        if structure.is_tensor(column):
            if column.shape[1:] != self._shape or column.dtype != self._dtype:
                raise self.ragged([column[0], self._out[0]], _tensor_text)
            rows.copy_(column)
            return
        for value in column:
            if (
                not structure.is_tensor(value)
                or value.shape != self._shape
                or value.dtype != self._dtype
            ):
                raise self.ragged([*column, self._out[0]], _tensor_text)
        with torch.no_grad():
            torch.stack(list(column), out=rows)

    def finish(self, tensors: bool) -> Any:
        return self._out


def _leaf(name: str, first: Any, rows: int, recycler: Recycler) -> _Leaf:
    if isinstance(first, np.ndarray):
        return _ArrayLeaf(name, first, rows, recycler)
    if isinstance(first, (bool, int, float, complex, np.generic)):
        return _ScalarLeaf(name, first, rows)
    if isinstance(first, (str, bytes, type(None))):
        return _ListLeaf(name, rows)
    if structure.is_tensor(first):
        return _TensorLeaf(name, first, rows)
    raise TypeError(
        f"{name!r} is a {type(first).__name__}, which cannot be stacked; turn it into an array "
        "in a map, or give .batch(collate=...)"
    )


def _as_tensor(array: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(array)


def _array_text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _tensor_text(value: Any) -> str:
    if structure.is_tensor(value):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
