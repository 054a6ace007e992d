"""NumPy arrays or memory maps of one length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.buffers import Recycler
from stoker.cache.fingerprint import Fingerprint
from stoker.sources.source import IndexedSource, Indices, Rows


class ArraySource(IndexedSource):
    """NumPy arrays or memory maps of one length; an example is a row of each.

    Rows are copied out of the arrays: what is done to an example does not reach them. What is in
    memory, or in a part of a map, says nothing about itself: it has no identity.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        if not arrays:
            raise TypeError("from_arrays needs at least one array")
        for array in arrays:
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise TypeError(
                    f"from_arrays takes NumPy arrays of at least one dimension, not "
                    f"{type(array).__name__}; use np.asarray(...), or from_dataset"
                )
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1:
            raise ValueError(f"from_arrays needs arrays of one length, not {lengths}")
        self.arrays = [np.asarray(array) for array in arrays]
        # Rows are copied fastest from two dimensions.
        self._flat = [
            a.reshape(len(a), math.prod(a.shape[1:])) if a.ndim > 2 and a.flags.c_contiguous else a
            for a in self.arrays
        ]
        # Strings and objects go the way of single examples: batches of them are lists.
        self._stacks = all(array.dtype.kind in "biufcmM" for array in self.arrays)

    @property
    def name(self) -> str:
        shapes = ", ".join(f"{a.dtype} {list(a.shape)}" for a in self.arrays)
        return f"from_arrays({shapes})"

    @property
    def fields(self) -> Sequence[str | int]:
        """The positions of the arrays; none of a single one."""
        return range(len(self.arrays)) if len(self.arrays) > 1 else ()

    @property
    def rows(self) -> Rows | None:
        """This, unless the arrays hold strings or objects."""
        return self if self._stacks else None

    def __len__(self) -> int:
        return len(self.arrays[0])

    def fetch(self, indices: Indices) -> list[Any]:
        """Return rows: a bare row of one array, or tuples of rows."""
        columns = [list(array[np.asarray(indices)]) for array in self.arrays]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def path(self, index: int) -> str | None:
        """Return None: there are no files."""
        return None

    def fingerprint(self, index: int) -> Fingerprint:
        return Fingerprint(int(index))

    def allocate(self, rows: int, recycler: Recycler) -> Any:
        outs = [recycler.array((rows, *a.shape[1:]), a.dtype) for a in self.arrays]
        return outs[0] if len(outs) == 1 else tuple(outs)

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
        for flat, out in zip(self._flat, outs, strict=True):
            rows = out[start:stop]
            if flat.ndim != out.ndim:
                rows = rows.reshape(len(indices), flat.shape[1])
            if flat.flags.c_contiguous:
                # "clip" lets NumPy write straight into out; the indices are in range.
                flat.take(indices, axis=0, out=rows, mode="clip")
            else:
                rows[...] = flat[indices]  # take() would make all of the array contiguous first
