"""Arrays of one length: in memory, mapped from files, in HDF5, or any sliceable array."""

from __future__ import annotations

import math
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Allocator
from stoker.basics.process import OwningProcess
from stoker.images import native
from stoker.sources.files import version_of
from stoker.sources.origin import IndexedSource
from stoker.sources.source import Indices, Rows

# Of a row: smaller ones, and larger ones, are copied by NumPy as fast (native/csrc/files.c).
_GATHERED_BYTES = range(256, 16 << 10)
_INHERITED: list[Any] = []
"""Files of the parent, which a forked child must not close."""


class ArraySource(IndexedSource, Rows):
    """Arrays of one length; an example is a row of each.

    Rows are copied out of the arrays: changes to an example do not reach the arrays. An array in
    memory, or a part of a memory map, has no identity.
    """

    prefers_blocks = False

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
        """This source, unless batches are not plain copies of rows (strings or objects)."""
        return self if self._stacks else None

    def __len__(self) -> int:
        return self._columns[0].shape[0]

    def column(self, field: str | int) -> NDArray[Any]:
        return self._columns[int(field)].rows(np.arange(len(self)))

    def fetch(self, indices: Indices) -> list[Any]:
        """Return rows: a bare row of one array, or tuples of rows."""
        wanted = np.asarray(indices, np.int64)
        columns = [list(column.rows(wanted)) for column in self._columns]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def allocate(self, rows: int, recycler: Allocator) -> Any:
        return _batch([column.allocate(rows, recycler) for column in self._columns])

    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        outs = batch if isinstance(batch, tuple) else (batch,)
        stop = start + len(indices)
        for column, out in zip(self._columns, outs, strict=True):
            column.copy_to(out[start:stop], indices)

    def take(self, indices: NDArray[np.int64], recycler: Allocator) -> Any:
        return _batch([column.take(indices, recycler) for column in self._columns])


def _is_stacked(column: Column) -> bool:
    """True if batches are plain copies of rows: not of strings or objects, nor of swapped bytes."""
    is_native = column.dtype.isnative or len(column.shape) > 1
    return is_native and column.dtype.kind in "biufcmM"


def _batch(outs: list[NDArray[Any]]) -> Any:
    return outs[0] if len(outs) == 1 else tuple(outs)


class Column(ABC):
    """Rows by number, of one shape and dtype; safe to use from any thread.

    ``chunk_rows``: how many rows each read brings, even if only one is wanted; 1: each row alone.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int = 1

    @abstractmethod
    def rows(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return rows, in memory of their own."""

    @abstractmethod
    def copy_to(self, out: NDArray[Any], indices: NDArray[np.int64]) -> None:
        """Copy rows into an array of their shape and dtype."""

    def allocate(self, rows: int, recycler: Allocator) -> NDArray[Any]:
        """Return an array for so many rows, to be filled by ``copy_to``."""
        return recycler.array((rows, *self.shape[1:]), self.dtype)

    def take(self, indices: NDArray[np.int64], recycler: Allocator) -> NDArray[Any]:
        out = self.allocate(len(indices), recycler)
        self.copy_to(out, indices)
        return out


def column_of(array: Any) -> Column:
    """Return the column for a user's array. Raises TypeError for what has no numbered rows."""
    kind = type(array).__name__
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            "from_arrays: the masked values of a MaskedArray would come like any others; give "
            ".filled(...), and np.ma.getmaskarray(...) as a second array if you need the mask"
        )
    if isinstance(array, np.ndarray):
        if array.ndim:
            return MemoryColumn(array)
    else:
        h5py: Any = sys.modules.get("h5py")
        if h5py is not None and isinstance(array, h5py.Dataset):
            array = HdfArray(array)
        is_sliced = all(hasattr(array, name) for name in ("shape", "dtype", "__getitem__"))
        # pandas takes labels in brackets, and positions elsewhere.
        if is_sliced and array.shape and not hasattr(array, "iloc"):
            return SlicedColumn(array)
    raise TypeError(
        "from_arrays takes NumPy arrays, or objects with shape, dtype and slices, of at least "
        f"one dimension, not {kind}; use np.asarray(...), or from_dataset"
    )


class MemoryColumn(Column):
    """A NumPy array. One that is mapped from a file is pickled as the place in that file."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._given = array
        self._array = np.asarray(array)
        self.shape, self.dtype = array.shape, array.dtype
        self._flat, values = self._array, math.prod(array.shape[1:])
        if array.ndim > 2 and array.flags.c_contiguous:  # NumPy copies rows fastest from two
            self._flat = self._array.reshape(len(array), values)
        row_bytes = values * array.itemsize
        is_whole = self._array[:1].flags.c_contiguous and not array.dtype.hasobject
        self._is_gathered = is_whole and row_bytes in _GATHERED_BYTES

    def __reduce__(self) -> tuple[object, ...]:
        place = _place_of(self._given)
        return (MemoryColumn, (self._given,)) if place is None else (_map_file, place)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        found: NDArray[Any] = self._array[indices]
        return found

    def copy_to(self, out: NDArray[Any], indices: NDArray[np.int64]) -> None:
        library = native.library() if self._is_gathered else None
        if library is not None:
            library.gather_rows(self._array, np.ascontiguousarray(indices), out)
            return
        flat = self._flat
        if flat.ndim != out.ndim:
            out = out.reshape(len(indices), flat.shape[1])
        if flat.flags.c_contiguous:
            # "clip" lets NumPy write straight into out; the indices are in range.
            flat.take(indices, axis=0, out=out, mode="clip")
        else:
            out[...] = self.rows(indices)  # take() would make all of the array contiguous first

    def take(self, indices: NDArray[np.int64], recycler: Allocator) -> NDArray[Any]:
        if self._flat.flags.c_contiguous or (self._is_gathered and native.library() is not None):
            return super().take(indices, recycler)
        return np.ascontiguousarray(self.rows(indices))  # its order in memory is NumPy's choice


class SlicedColumn(Column):
    """A sliceable object with ``shape`` and ``dtype``: HDF5, Zarr, TensorStore.

    Rows are requested in ascending order, each once: by a slice if they are consecutive, else by a
    list of indices, or by slices if the object does not take lists.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = tuple(map(int, array.shape))
        try:
            first = np.asarray(array[0:1])
        except (TypeError, RuntimeError) as error:
            if "unsupported ScalarType" in str(error):  # PyTorch's
                integers = f"torch.int{8 * array.element_size()}"
                raise ValueError(
                    f"from_arrays: NumPy has no {array.dtype}. Give from_dataset the tensor, or a "
                    "TensorDataset of several, or, which is faster, from_arrays its "
                    f".view({integers}), and put .map(lambda batch: batch.view({array.dtype})) "
                    "behind .to_torch(...)"
                ) from error
            raise ValueError(
                f"from_arrays: the first row of this {type(array).__name__} is not an array: "
                f"{error}"
            ) from error
        if first.shape != (min(1, self.shape[0]), *self.shape[1:]):
            raise TypeError(
                f"from_arrays: a {type(array).__name__} of shape {list(self.shape)} gives "
                f"{list(first.shape)} for [0:1]"
            )
        self.dtype = first.dtype
        self._takes_lists = _takes_lists(array, first.shape)
        chunks = getattr(array, "chunks", None)  # h5py and Zarr tell it so
        if chunks is None:  # TensorStore so
            layout = getattr(array, "chunk_layout", None)
            chunks = getattr(getattr(layout, "read_chunk", None), "shape", None)
        rows = chunks[0] if chunks else 1
        self.chunk_rows = int(max(rows) if isinstance(rows, tuple) else rows)  # Dask tells all

    def rows(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        found, back = self._read(indices)
        return found[back]

    def copy_to(self, out: NDArray[Any], indices: NDArray[np.int64]) -> None:
        found, back = self._read(indices)
        out[...] = found[back]

    def _read(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return rows, and which of them is at which place."""
        wanted, back = np.unique(indices, return_inverse=True)
        if not len(wanted):
            return np.empty((0, *self.shape[1:]), self.dtype), back
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        if len(runs) > 1 and self._takes_lists:
            found = np.asarray(self._array[wanted.tolist()])
        else:
            each = [np.asarray(self._array[int(run[0]) : int(run[-1]) + 1]) for run in runs]
            found = each[0] if len(each) == 1 else np.concatenate(each)
        if found.shape != (len(wanted), *self.shape[1:]):
            raise ValueError(
                f"{type(self._array).__name__}: {len(wanted):,} rows were requested, but an array "
                f"of shape {list(found.shape)} came"
            )
        return found, back


def _takes_lists(array: Any, shape: tuple[int, ...]) -> bool:
    try:
        return bool(shape[0]) and np.asarray(array[[0]]).shape == shape
    except (TypeError, IndexError, ValueError, KeyError, NotImplementedError):
        return False


def _place_of(array: NDArray[Any]) -> tuple[str, np.dtype[Any], int, tuple[int, ...]] | None:
    """Return an array's place in the file that it is mapped from; None if it may differ from it."""
    if not isinstance(array, np.memmap) or array.filename is None or not array.flags.c_contiguous:
        return None
    # NumPy names no public way from a memory map to its mapping; a view of it has one, too.
    mapped = getattr(array, "_mmap", None)
    if mapped is None or array.mode == "c" or not array.size:
        return None
    begin = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    within = array.__array_interface__["data"][0] - begin
    before = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return os.fspath(array.filename), array.dtype, before + within, array.shape


def _map_file(path: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> MemoryColumn:
    return MemoryColumn(np.memmap(path, dtype, "r", offset, shape))


class HdfArray:
    """A dataset of a file, by the file's path: h5py's own can neither be sent nor inherited.

    It is opened when it is first read in a process, and stays open as long as this object.
    """

    def __init__(self, dataset: Any) -> None:
        if not dataset:
            raise ValueError("from_arrays: the HDF5 file of this dataset is closed")
        path = os.path.abspath(os.fsdecode(dataset.file.filename))
        if not os.path.isfile(path):
            raise ValueError(
                f"from_arrays: the HDF5 dataset {dataset.name!r} is not in a file of its own, so "
                "workers could not open it: use np.asarray(...)"
            )
        if dataset.file.mode != "r":
            raise ValueError(
                f"from_arrays: {path} is open for writing, so workers could not open it: open it "
                "with h5py.File(path, 'r')"
            )
        self._path, self._name = path, dataset.name
        self.shape, self.dtype = dataset.shape, dataset.dtype
        self.chunks = dataset.chunks
        self._version = version_of(os.stat(path))
        self._open: Any = None
        self._owner = OwningProcess()

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_owner", "_open")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._open, self._owner = None, OwningProcess()

    def __getitem__(self, rows: Any) -> Any:
        if not self._owner.is_current:
            _INHERITED.append(self._open)
            self._open, self._owner = None, OwningProcess()
        if self._open is None:
            self._open = self._open_dataset()
        return self._open[rows]

    def _open_dataset(self) -> Any:
        import h5py

        if version_of(os.stat(self._path)) != self._version:
            raise ValueError(
                f"{self._path} has changed since the pipeline was built: build it again"
            )
        return h5py.File(self._path, "r")[self._name]
