"""Arrays of one length: in memory, or in files that are sliced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.buffers import Recycler
from stoker.cache.contents import told_by_rows
from stoker.cache.fingerprint import Fingerprint
from stoker.sources.columns import Column, column_of
from stoker.sources.source import IndexedSource, Indices, Rows


class ArraySource(IndexedSource, Rows):
    """Arrays of one length; an example is a row of each.

    Rows are copied out of the arrays: what is done to an example does not reach them. What is in
    memory, or in a part of a map, says nothing about itself: it has no identity.
    """

    is_numbered = True

    def __init__(self, arrays: Sequence[Any]) -> None:
        if not arrays:
            raise TypeError("from_arrays needs at least one array")
        self._columns = [column_of(array) for array in arrays]
        lengths = [column.shape[0] for column in self._columns]
        if len(set(lengths)) > 1:
            raise ValueError(f"from_arrays needs arrays of one length, not {lengths}")
        self._stacks = all(map(_is_stacked, self._columns))

    @property
    def name(self) -> str:
        shapes = ", ".join(f"{a.dtype} {list(a.shape)}" for a in self._columns)
        return f"from_arrays({shapes})"

    @property
    def fields(self) -> Sequence[str | int]:
        """The positions of the arrays; none of a single one."""
        return range(len(self._columns)) if len(self._columns) > 1 else ()

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """The chunks of the array that has the largest ones; None where rows are read alone."""
        chunk = max(column.chunk_rows for column in self._columns)
        if chunk == 1:
            return None
        return np.minimum(np.arange(chunk, len(self) + chunk, chunk, dtype=np.int64), len(self))

    @property
    def rows(self) -> Rows | None:
        """This, unless batches are others than copies of rows: of strings or objects, say."""
        return self if self._stacks else None

    def __len__(self) -> int:
        return self._columns[0].shape[0]

    def fetch(self, indices: Indices) -> list[Any]:
        """Return rows: a bare row of one array, or tuples of rows."""
        wanted = np.asarray(indices, np.int64)
        columns = [list(column.rows(wanted)) for column in self._columns]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def path(self, index: int) -> str | None:
        """Return None: there are no files."""
        return None

    def contents(self) -> str:
        return told_by_rows(self.fetch, len(self))

    def fingerprint(self, index: int) -> Fingerprint:
        return Fingerprint(int(index))

    def allocate(self, rows: int, recycler: Recycler) -> Any:
        return _batch([column.allocate(rows, recycler) for column in self._columns])

    def split(self, batch: Any, rows: int) -> list[Any]:
        first = batch[0] if isinstance(batch, tuple) else batch
        if len(first) <= rows:
            return [batch]
        spans = [slice(start, start + rows) for start in range(0, len(first), rows)]
        if isinstance(batch, tuple):
            return [tuple(array[span] for array in batch) for span in spans]
        return [batch[span] for span in spans]

    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        outs = batch if isinstance(batch, tuple) else (batch,)
        stop = start + len(indices)
        for column, out in zip(self._columns, outs, strict=True):
            column.copy_to(out[start:stop], indices)

    def gathered(self, indices: NDArray[np.int64], recycler: Recycler) -> Any:
        return _batch([column.gathered(indices, recycler) for column in self._columns])


def _is_stacked(column: Column) -> bool:
    """Whether batches are copies of rows, and so need no single examples.

    Those of strings and objects are lists; NumPy's numbers are of this machine's byte order.
    """
    is_native = column.dtype.isnative or len(column.shape) > 1
    return is_native and column.dtype.kind in "biufcmM"


def _batch(outs: list[NDArray[Any]]) -> Any:
    return outs[0] if len(outs) == 1 else tuple(outs)
