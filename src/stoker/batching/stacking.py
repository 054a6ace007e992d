"""Whole batches of usual examples, stacked in one go.

Usual are arrays, numbers, strings and bytes in tuples, lists and dicts: what most datasets give.
``Builder`` takes whatever there is, in pieces, from several threads, and for that keeps an object
for each leaf; a small batch costs several times less here. What comes out is the same. Whatever is
not usual, or does not fit together, is left to the ``Builder``, which says what is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Recycler
from stoker.images import native

_form = operator.attrgetter("shape", "dtype")
_NUMBERS = {kind: np.asarray(kind()).dtype for kind in (bool, int, float, complex)}
_LEAVES = frozenset({np.ndarray, str, bytes, *_NUMBERS})


class _Misfit(Exception):
    """Examples are not alike."""


def stack(examples: Sequence[Any], recycler: Recycler) -> Any | None:
    """Return a batch of examples, which are copied; None where they are not usual, or not alike."""
    if not _is_usual(examples[0]):
        return None
    try:
        return _stack_column(examples, recycler)
    except (_Misfit, KeyError, OverflowError):
        return None


def _is_usual(example: Any) -> bool:
    kind = type(example)
    if kind in _LEAVES:
        return True
    if kind is tuple or kind is list:
        return bool(example) and all(map(_is_usual, example))
    if kind is dict:
        return bool(example) and all(map(_is_usual, example.values()))
    return isinstance(example, np.generic) and example.dtype.kind in "biufc"


def _stack_column(column: Sequence[Any], recycler: Recycler) -> Any:
    first, rows = column[0], len(column)
    kind = type(first)
    if rows > 1 and {*map(type, column)} != {kind}:
        raise _Misfit
    if kind is np.ndarray:
        return _array(column, recycler)
    if kind in _NUMBERS:
        return np.array(column, _NUMBERS[kind])
    if kind is str or kind is bytes:
        return list(column)
    if isinstance(first, np.generic):
        return np.array(column, first.dtype)  # of one type: times, which have units, are not usual
    if rows > 1 and {*map(len, column)} != {len(first)}:
        raise _Misfit
    if kind is dict:
        return {key: _stack_column([each[key] for each in column], recycler) for key in first}
    return kind([_stack_column(part, recycler) for part in zip(*column, strict=True)])


def _array(column: Sequence[Any], recycler: Recycler) -> Any:
    first, rows = column[0], len(column)
    shape, dtype = form = _form(first)
    if rows > 1 and shape and shape[0]:
        return _joined(column, recycler)
    if rows > 1 and [*map(_form, column)] != [form] * rows:
        raise _Misfit
    out = recycler.array((rows, *shape), dtype)
    write_rows(column, out)
    return out


def _joined(column: Sequence[Any], recycler: Recycler) -> Any:
    """Return a batch of arrays with axes; NumPy compares the other axes and the dtypes for it.

    Asking each array for its shape and dtype takes a third of the time of copying 3 KB.
    """
    first = column[0]
    try:
        if {*map(len, column)} != {len(first)}:
            raise _Misfit
        out = recycler.array((len(column), *first.shape), first.dtype)
        if out.nbytes < _LARGE_BYTES * len(column) or not _copied(column, out):
            np.concatenate(column, out=_end_to_end(out), casting="no")
    except (TypeError, ValueError):  # also of what has no axes
        raise _Misfit from None
    return out


# Smaller rows are copied faster than their addresses are asked for. Chosen, not measured.
_LARGE_BYTES = 1 << 14


def write_rows(column: Sequence[Any], rows: NDArray[Any]) -> None:
    """Copy arrays of one form into the rows of another."""
    shape = rows.shape[1:]
    if len(column) > 1 and rows.nbytes >= _LARGE_BYTES * len(column) and _copied(column, rows):
        return
    if len(column) > 1 and shape and shape[0] and rows.flags.c_contiguous:
        # Joining along the first axis writes what stacking would, without n new views.
        np.concatenate(column, out=_end_to_end(rows))
    else:
        for row, value in enumerate(column):
            rows[row] = value


def _end_to_end(rows: NDArray[Any]) -> NDArray[Any]:
    # Not -1: where another axis is 0, that could be any number.
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def _copied(column: Sequence[Any], rows: NDArray[Any]) -> bool:
    """Copy arrays into rows in one call, if it can be.

    NumPy releases the GIL for each large array, and then waits for it behind other threads.
    """
    copy: Callable[..., None] | None = getattr(native.library(), "copy_rows", None)
    if copy is None:
        return False
    try:
        copy(column, rows)
    except ValueError:  # other strides, objects, or not alike
        return False
    return True
