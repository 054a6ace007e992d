"""Batching: examples become the rows of arrays, written where they will be read."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Allocator, Recycler
from stoker.basics.signals import pass_on
from stoker.basics.validate import is_whole_number
from stoker.sources.origin import UserObject
from stoker.stages.batching.stacking import stack, write_rows
from stoker.stages.stage import ChainStage, ChainView, EnginePlan, Traits, first_with

Collate = Callable[[list[Any]], Any]


class UnlikeError(ValueError):
    """An example does not fit into its batch.

    Attributes:
        row: which of the examples it is, counted from the first of the batch.
    """

    def __init__(self, text: str, row: int = 0) -> None:
        super().__init__(text)
        self.row = row


@dataclass(frozen=True)
class Batch(ChainStage):
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
    def call(self) -> str:
        return f"batch({self.n})"

    def placed(self, before: ChainView) -> Batch:
        """Check that single examples come here, from pools that hold a batch."""
        if before.source.yields_batches:
            raise ValueError("a loader yields batches already: set its batch_size")
        stage = first_with(before.stages, lambda t: t.batches)
        if stage is not None:
            raise ValueError(f".batch({self.n}) cannot follow {stage.name}: batch once")
        for echo in before.echoes:
            echo.check_holds(self.n)
        return self

    def lower(self, to: EnginePlan) -> None:
        to.batch(self)

    def user_objects(self) -> list[UserObject]:
        return [] if self.collate is None else [UserObject("collate of " + self.name, self.collate)]

    def with_user_objects(self, objects: Sequence[Any]) -> Batch:
        return replace(self, collate=objects[0]) if objects else self

    def count(self, items: int) -> int:
        """Return the number of batches that so many examples make."""
        return items // self.n if self.drop_last else -(-items // self.n)

    def signature(self) -> str:
        """Return its size, and what becomes of the rest."""
        return f"batch({self.n}, drop_last={self.drop_last})"


class RowError(Exception):
    """What a user's collate function raised because of one example.

    Attributes:
        error: what it raised.
        row: which of the examples it is, counted from the first of the batch.
    """

    def __init__(self, error: Exception, row: int) -> None:
        super().__init__(error, row)
        self.error = error
        self.row = row


class Columns:
    """A run of examples turned into one column for each leaf; what process workers send."""

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
    """Examples that a worker process could not stack: the builder says which is to blame."""


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
        self._refused: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def put(self, start: int, examples: list[Any]) -> None:
        """Write examples as rows ``start ..``; the rows are copied."""
        if self._examples is not None:
            self._examples[start : start + len(examples)] = examples
            return
        if 0 < len(examples) == self._rows:
            self._stacked = stack(examples, self._recycler)
        if examples and self._stacked is None:
            self.put_each(start, examples)

    def put_each(self, start: int, examples: list[Any]) -> None:
        """Write examples of any kind, as ``put`` does."""
        template = self._template if self._leaves else examples[0]
        try:
            self._put(start, template, _columns(template, examples))
        except UnlikeError:
            self._refused[start] = examples

    def put_columns(self, start: int, made: Columns) -> None:
        """Write columns that another process made, as rows ``start ..``."""
        try:
            self._put(start, made.template, made.columns)
        except UnlikeError:
            self._refused[start] = made.rows()

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

        Raises UnlikeError when the examples do not fit together; what the user's function does, as
        RowError where it is one example's fault.
        """
        if self._examples is not None:
            collate = collate or self._collate
            assert collate is not None
            return collate_examples(collate, self._examples)
        if self._stacked is not None:
            return self._stacked
        if self._refused:
            raise self._misfit()
        if self._leaves is None:
            raise AssertionError("a batch has at least one row")
        tensors = any(isinstance(leaf, (_TensorLeaf, _SparseLeaf)) for leaf in self._leaves)
        return _rebuilt(self._template, iter([leaf.finish(tensors) for leaf in self._leaves]))

    def _misfit(self) -> UnlikeError:
        """Return the error of the row to blame: the first that does not fit beside the others.

        Where most do not fit beside a few, and are alike, it is the first of those few.
        """
        unfit: dict[int, UnlikeError] = {}
        for start, examples in sorted(self._refused.items()):
            for row, example in enumerate(examples, start):
                template = self._template if self._leaves else example
                try:
                    self._put(row, template, _columns(template, [example]))
                except UnlikeError as error:
                    unfit[row] = error
        fit = [row for row in range(self._rows) if row not in unfit]
        first = min(unfit)
        kinds = {str(error) for error in unfit.values()}  # a number may have come in two forms
        are_alike = 2 * len(kinds) <= len(unfit)
        return UnlikeError(
            str(unfit[first]), fit[0] if 0 < len(fit) < len(unfit) and are_alike else first
        )

    def _allocate(self, template: Any, columns: Sequence[Any]) -> list[_Leaf]:
        with self._lock:
            if self._leaves is None:
                self._template = template
                self._leaves = [
                    _leaf(_Name(template, place), column[0], self._rows, self._recycler)
                    for place, column in enumerate(columns)
                ]
            return self._leaves


def batch_of(examples: list[Any], recycler: Recycler) -> Any:
    """Return the batch of these examples, one or more, which are copied; as ``Builder`` makes it.

    Most need no builder, which is 7 % of what a batch of one costs (bench/paths.py).
    """
    batch = stack(examples, recycler)
    if batch is not None:
        return batch
    builder = Builder(len(examples), None, recycler)
    builder.put_each(0, examples)
    return builder.finish()


def collate_examples(collate: Collate, examples: list[Any]) -> Any:
    """Return what a user's function makes of examples, whose list it may change.

    Raises what the function raises, as RowError where it is one example's fault; TypeError where
    it returns None.
    """
    kept = examples.copy()
    try:
        batch = collate(examples)
    except Exception as error:
        pass_on(error)
        row = _blame(collate, kept, type(error))
        if row is None:
            raise
        raise RowError(error, row) from None
    if batch is None:
        raise TypeError("collate returned None: return the batch")
    return batch


def _rebuilt(template: Any, leaves: Iterator[Any]) -> Any:
    return pytree.map_leaves(lambda _: next(leaves), template)


def collated(examples: list[Any], allocator: Allocator) -> Columns:
    """Turn examples into columns whose arrays are stacked (shapes are checked)."""
    template = examples[0]
    stacked = []
    try:
        for place, column in enumerate(_columns(template, examples)):
            leaf = _leaf(_Name(template, place), column[0], len(examples), allocator)
            leaf.put(0, column)
            stacked.append(leaf.column())
    except UnlikeError:
        builder = Builder(len(examples), None, Recycler())
        builder.put(0, examples)
        builder.finish()  # says which is to blame
        raise
    return Columns(pytree.map_leaves(lambda _: None, template), stacked)


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


def _blame(collate: Collate, examples: list[Any], kind: type[Exception]) -> int | None:
    """Return the row without which a user's function would not have failed; None where none is.

    It is looked for by calling the function again, with fewer examples: about log2(n) times.
    """

    def fails(some: list[Any]) -> bool:
        try:
            collate(some)
        except kind:
            return True
        except Exception:
            return False
        return False

    counts = range(1, len(examples))
    fewest = 1 + bisect.bisect_left(counts, True, key=lambda n: fails(examples[:n]))
    row, others = fewest - 1, examples[1:3]
    if len(examples) == 1:
        return None
    if fewest == 1 or (fewest == 2 < len(examples)):  # is it the first one, or the second?
        row = 1 if fails(others) else 0
        if fewest == 1 and row == 1:
            return None  # the function fails on any example
    if len(examples) == fewest == 2 and not fails(others):
        return None  # each of the two is right on its own
    return None if fails(_without(examples, row)) else row


def _without(examples: list[Any], row: int) -> list[Any]:
    return examples[:row] + examples[row + 1 :]


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
        """Write rows ``start ..``. Raises UnlikeError where they do not fit."""

    def column(self) -> Any:
        """Return the rows as another process is to put them."""
        return self.out

    def finish(self, tensors: bool) -> Any:
        out = self.column()
        if tensors and isinstance(out, np.ndarray):
            import torch

            return torch.from_numpy(pytree.native(out))
        return out

    def text(self, value: Any) -> str:
        """Say of what kind a value is."""
        if pytree.is_tensor(value) and pytree.is_sparse(value):
            return f"{value.layout} {list(value.shape)}"
        return str(value.dtype) if isinstance(value, np.generic) else type(value).__name__

    def unlike(self, column: Any, fits: Callable[[Any], bool], usual: Any) -> UnlikeError:
        """Return the error of rows of which some do not fit beside those before, as ``usual``."""
        odd = next(value for value in column if not fits(value))
        seen = list(dict.fromkeys(self.text(value) for value in [odd, *column, usual]))
        if len(seen) == 1:
            seen.append("another in rows before")
        shown = ", ".join(seen[:4]) + (", ..." if len(seen) > 4 else "")
        way = "make the examples alike in a map (resize, crop, pad)"
        if type(None).__name__ in seen:
            way = "leave such examples out with .filter(), put a value in place of None in a map"
        return UnlikeError(
            f"{self.name} differs within a batch: {shown}; {way}, or give .batch(collate=...)"
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


class _SparseLeaf(_DenseLeaf):
    """Sparse tensors, which are stacked at the end: torch writes them into no rows."""

    @staticmethod
    def is_one(value: Any) -> bool:
        return pytree.is_tensor(value) and pytree.is_sparse(value)

    def __init__(self, name: _Name, first: Any, rows: int) -> None:
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


class _NumberLeaf(_Leaf):
    """Numbers, whose dtype is known when all are there."""

    def __init__(self, name: _Name, first: Any) -> None:
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
        """Return numbers of one dtype in it, of several as int64, float64 or complex128.

        So it is the same for any pieces. Raises UnlikeError for whole numbers that need more.
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


class _ScalarLeaf(_Leaf):
    """NumPy's other scalars: times and structured values, of one dtype."""

    def __init__(self, name: _Name, first: Any, rows: int) -> None:
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
                raise self.unlike(column, self._fits, self._kind and self._kind())
            self.out[row] = kind(value)  # NumPy's own strings become plain ones

    def _fits(self, value: Any) -> bool:
        return value is None or (self._kind is not None and isinstance(value, self._kind))


_KINDS = "biufc"
_MOST = np.iinfo(np.int64).max
_NUMBERS = {kind: np.asarray(kind()).dtype for kind in (bool, int, float, complex)}


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float, complex)):
        return True
    is_one = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
    return is_one and value.dtype.kind in _KINDS and value.dtype.isnative


def _leaf(name: _Name, first: Any, rows: int, allocator: Allocator) -> _Leaf:
    if _is_number(first):
        return _NumberLeaf(name, first)
    if isinstance(first, np.ndarray):
        return _ArrayLeaf(name, first, allocator.array((rows, *first.shape), first.dtype))
    if isinstance(first, _TEXT):
        return _ListLeaf(name, [None] * rows)
    if isinstance(first, np.generic):
        return _ScalarLeaf(name, first, rows)
    if pytree.is_jax_array(first):  # stacked on the host: JAX would dispatch each example
        first = np.asarray(first)
        return _JaxLeaf(name, first, allocator.array((rows, *first.shape), first.dtype))
    if pytree.is_tensor(first):
        import torch

        if first.layout == torch.sparse_coo:
            return _SparseLeaf(name, first, rows)
        if pytree.is_sparse(first):
            raise UnlikeError(
                f"{name} is a tensor of {first.layout}, and torch stacks sparse tensors only as "
                "sparse_coo: convert it in a map (.to_sparse_coo()), or give .batch(collate=...)"
            )
        # In any thread's mode: a tensor of inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            out = torch.empty((rows, *first.shape), dtype=first.dtype, device=first.device)
        return _TensorLeaf(name, first, out)
    raise UnlikeError(
        f"{name} is a {type(first).__name__}, which cannot be stacked; turn it into an array "
        "in a map, or give .batch(collate=...)"
    )
