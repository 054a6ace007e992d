"""Makes batches: examples are written as rows of arrays, where they will be read."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Allocator, Recycler
from stoker.batching.leaves import (
    Leaf,
    LeafName,
    SparseLeaf,
    TensorLeaf,
    make_leaf,
)
from stoker.batching.stacking import stack
from stoker.batching.user_collate import Collate, collate_examples
from stoker.errors import UnlikeError


class Columns:
    """Examples as one column for each leaf: worker processes send them so."""

    def __init__(self, template: Any, columns: list[Any]) -> None:
        self.template = template
        self.columns = columns

    def rows(self) -> list[Any]:
        """Return the examples again."""
        parts = zip(*self.columns, strict=True)
        return [_rebuilt(self.template, iter(part)) for part in parts]

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self.template, self.columns)


class Misfits(list[Any]):
    """Examples that a worker process could not stack: the builder finds the one that differs."""


class Builder:
    """Builds one batch. Several threads may put rows; the last one calls ``finish``.

    Args:
        rows: the number of examples in this batch.
        collate: the user's collate function, which gets the list of examples; None to stack them.
        recycler: the owner of the arrays.
    """

    def __init__(self, rows: int, collate: Collate | None, recycler: Recycler) -> None:
        self._rows = rows
        self._collate = collate
        self._recycler = recycler
        self._examples: list[Any] | None = [None] * rows if collate else None
        self._batch: Any = None  # a batch that was stacked in one go
        self._template: Any = None
        self._leaves: list[Leaf] | None = None
        self._misfits: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def put(self, start: int, examples: list[Any]) -> None:
        """Write examples as rows ``start ..``; the rows are copied."""
        if self._examples is not None:
            self._examples[start : start + len(examples)] = examples
            return
        if 0 < len(examples) == self._rows:
            self._batch = stack(examples, self._recycler)
        if examples and self._batch is None:
            self.put_each(start, examples)

    def put_each(self, start: int, examples: list[Any]) -> None:
        """Write examples of any kind, as ``put`` does."""
        template = self._template if self._leaves else examples[0]
        try:
            self._put(start, template, _columns(template, examples))
        except UnlikeError:
            self._misfits[start] = examples

    def put_columns(self, start: int, columns: Columns) -> None:
        """Write columns from another process, as rows ``start ..``."""
        try:
            self._put(start, columns.template, columns.columns)
        except UnlikeError:
            self._misfits[start] = columns.rows()

    def _put(self, start: int, template: Any, columns: Sequence[Any]) -> None:
        leaves = self._leaves or self._allocate(template, columns)
        if template is not self._template:
            columns = self._in_order(template, columns)
        for leaf, column in zip(leaves, columns, strict=True):
            leaf.put(start, column)

    def _in_order(self, template: Any, columns: Sequence[Any]) -> Sequence[Any]:
        if pytree.structure(template) != pytree.structure(self._template):
            raise _unlike(
                f"{pytree.describe_node(self._template)} and {pytree.describe_node(template)}"
            )
        mine, theirs = map(pytree.leaf_names, (self._template, template))
        return columns if mine == theirs else [columns[theirs.index(name)] for name in mine]

    def finish(self, collate: Collate | None = None) -> Any:
        """Return the batch; ``collate`` is called in place of the builder's own.

        Raises UnlikeError if the examples do not fit together; the errors of a user's function, as
        RowError if a single example causes them.
        """
        if self._examples is not None:
            collate = collate or self._collate
            assert collate is not None
            return collate_examples(collate, self._examples)
        if self._batch is not None:
            return self._batch
        if self._misfits:
            raise self._misfit()
        if self._leaves is None:
            raise AssertionError("a batch has at least one row")
        tensors = any(isinstance(leaf, (TensorLeaf, SparseLeaf)) for leaf in self._leaves)
        return _rebuilt(self._template, iter([leaf.finish(tensors) for leaf in self._leaves]))

    def _misfit(self) -> UnlikeError:
        """Return the error of the row that differs: the first that does not fit the others.

        If most rows do not fit a few, and are alike, it is the first of those few.
        """
        unfit: dict[int, UnlikeError] = {}
        for start, examples in sorted(self._misfits.items()):
            for row, example in enumerate(examples, start):
                template = self._template if self._leaves else example
                try:
                    self._put(row, template, _columns(template, [example]))
                except UnlikeError as error:
                    unfit[row] = error
        fit = [row for row in range(self._rows) if row not in unfit]
        first = min(unfit)
        kinds = {str(error) for error in unfit.values()}  # a number may come as two types
        are_alike = 2 * len(kinds) <= len(unfit)
        return UnlikeError(
            str(unfit[first]), fit[0] if 0 < len(fit) < len(unfit) and are_alike else first
        )

    def _allocate(self, template: Any, columns: Sequence[Any]) -> list[Leaf]:
        with self._lock:
            if self._leaves is None:
                self._template = template
                self._leaves = [
                    make_leaf(LeafName(template, place), column[0], self._rows, self._recycler)
                    for place, column in enumerate(columns)
                ]
            return self._leaves


def batch_of(examples: list[Any], recycler: Recycler) -> Any:
    """Return the batch of one or more examples, which are copied; the same as by ``Builder``.

    Most batches need no builder, which is 7 % of the cost of a batch of one (bench/paths.py).
    """
    batch = stack(examples, recycler)
    if batch is not None:
        return batch
    builder = Builder(len(examples), None, recycler)
    builder.put_each(0, examples)
    return builder.finish()


def _rebuilt(template: Any, leaves: Iterator[Any]) -> Any:
    return pytree.map_leaves(lambda _: next(leaves), template)


def collated(examples: list[Any], allocator: Allocator) -> Columns:
    """Turn examples into columns whose arrays are stacked (shapes are checked)."""
    template = examples[0]
    arrays = []
    try:
        for place, column in enumerate(_columns(template, examples)):
            leaf = make_leaf(LeafName(template, place), column[0], len(examples), allocator)
            leaf.put(0, column)
            arrays.append(leaf.column())
    except UnlikeError:
        builder = Builder(len(examples), None, Recycler())
        builder.put(0, examples)
        builder.finish()  # raises the error of the row that differs
        raise
    return Columns(pytree.map_leaves(lambda _: None, template), arrays)


def _columns(template: Any, examples: Sequence[Any]) -> list[Any]:
    """Transpose examples into one sequence for each leaf of the template.

    Raises UnlikeError when an example differs from it in more than its leaves.
    """
    parts = pytree.children(template)
    if parts is None:
        return [examples]  # a node where a leaf should be is refused by the leaf
    names = [name for name, _ in parts]
    columns = _transpose(template, names, examples)
    if columns is not None:
        pairs = zip(parts, columns, strict=True)
        return [leaf for (_, child), column in pairs for leaf in _columns(child, column)]
    try:
        rows = [pytree.leaves_like(template, example) for example in examples]
    except TypeError as error:
        raise _unlike(str(error)) from None
    return list(zip(*rows, strict=True))


def _transpose(
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


def _unlike(what: str) -> UnlikeError:
    return UnlikeError(
        f"examples of one batch differ in structure: {what}; make them alike in a map, or give "
        ".batch(collate=...)"
    )
