"""Rows of Arrow columns that lie in many chunks, taken by memory address.

Arrow's own ``take`` joins all chunks of a column first: for 256 of a million lists in 16 chunks
that takes 5 ms with pyarrow 26, of which the taking itself is 15 us. Taking from each chunk
separately costs 7 us a chunk. Joining the chunks once would double the table's memory. So each
chunk is described here by the addresses of its buffers, and values are taken from all of them at
once: by ``stoker-native`` where it is installed, else by NumPy, through an array that spans the
whole memory of the process. Only values of the chunks are read.

This covers numbers, times, text, bytes and lists of these. Arrow takes all other types
(``values_of``).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.images import native

Places = NDArray[np.int64]
"""Addresses of the buffers of chunks, ``[width, chunks]``; of each chunk, what ``places`` returned.

They are in bytes, and those of bits in bits.
"""
Bools = NDArray[np.bool_]
Spans = tuple[NDArray[np.int64], NDArray[np.int64], Bools | None]
"""Each value's start in its chunk's items, its length, and whether it is not null."""
_ORIGIN = 64
"""The address that the first byte of ``_memory`` has: a multiple of any item's size, and not 0."""
_MEMORY_BYTES = 1 << 57  # more than the address space of any process has
NOWHERE = -1
"""The place of a bitmap that is not there: no value is null."""
# Of a value, on average. Longer ones are copied one by one (0.2 us), shorter ones by the item
# (4 ns each).
_SHORT_ITEMS = 48
# From which on a call of stoker-native, 5 us, and not 3, is worth it.
_MANY_ROWS = 512
LONG_BYTES = 1024
"""Of a text, on average. Longer ones are copied once, each by itself (0.2 us), others twice."""


class MisalignedError(Exception):
    """A chunk's buffers cannot be read in place, and must be copied."""


class Values(ABC):
    """Takes rows of one Arrow type out of chunks.

    Attributes:
        kind: the Arrow type.
        width: how many numbers describe the buffers of a chunk.
    """

    width: int

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    @abstractmethod
    def places(self, chunk: Any) -> list[int]:
        """Return the addresses of a chunk's buffers; the caller keeps the chunk alive.

        Raises MisalignedError if they cannot be read in place.
        """

    @abstractmethod
    def take(self, places: Places, which: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        """Return rows as an Arrow array.

        Args:
            places: the result of ``places``, for all chunks.
            which: each row's chunk, by number.
            rows: each row's number in its chunk.
        """

    def take_runs(
        self,
        places: Places,
        which: NDArray[np.int64],
        begins: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> Any:
        """Return runs of rows, one after another, as an Arrow array."""
        return self.take(places, np.repeat(which, lengths), _numbers_of(begins, lengths))


class Numbers(Values):
    """Values of a fixed size in whole bytes: numbers, times.

    Attributes:
        dtype: NumPy's dtype of the numbers; for other values, an integer dtype of the same size.
    """

    width = 2

    def __init__(self, kind: Any, dtype: np.dtype[Any]) -> None:
        super().__init__(kind)
        self.dtype = dtype

    def places(self, chunk: Any) -> list[int]:
        values, itemsize = chunk.buffers()[1], self.dtype.itemsize
        if values is None or (values.address - _ORIGIN) % itemsize:
            raise MisalignedError
        return [_bitmap_of(chunk), values.address + chunk.offset * itemsize]

    def take(self, places: Places, which: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        values = self.numbers(places, which, rows)
        return _array(self.kind, len(rows), _valid(places[0], which, rows), values)

    def numbers(
        self,
        places: Places,
        which: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Return rows as a NumPy array, in ``out`` if given; the values of nulls are arbitrary."""
        return _items(self.dtype, places[1], which, rows, out)

    def take_runs(
        self,
        places: Places,
        which: NDArray[np.int64],
        begins: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> Any:
        values = self.runs(places, which, begins, lengths)
        valid = None
        if places[0].max() != NOWHERE:
            rows = _numbers_of(begins, lengths)
            valid = _valid(places[0], np.repeat(which, lengths), rows)
        return _array(self.kind, len(values), valid, values)

    def runs(
        self,
        places: Places,
        which: NDArray[np.int64],
        begins: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[Any]:
        """Return runs of rows, one after another; the values of nulls are arbitrary."""
        size = self.dtype.itemsize
        firsts = begins * size + _each(places[1], which)
        library = _library(len(lengths))
        if library is not None:
            joined = np.empty(int(lengths.sum()), self.dtype)
            library.copy_runs(firsts, lengths * size, joined.view(np.uint8))
            return joined
        begins = (firsts - _ORIGIN) // size
        most = int(lengths.max(initial=0))
        if most and int(lengths.min()) == most:
            # A run as one item: never by ``take``, which would copy all of such an array first.
            return _memory_of_runs(self.dtype, most)[begins].view(self.dtype)
        if int(lengths.sum()) <= _SHORT_ITEMS * len(lengths):
            return _memory(self.dtype).take(_numbers_of(begins, lengths), mode="clip")
        ends = np.cumsum(lengths)
        out = np.empty(int(ends[-1]), self.dtype)
        memory = _memory(self.dtype)
        spans = zip(ends.tolist(), lengths.tolist(), begins.tolist(), strict=True)
        for end, length, begin in spans:
            out[end - length : end] = memory[begin : begin + length]
        return out


class Booleans(Values):
    """Bits."""

    width = 2
    dtype = np.dtype(np.bool_)

    def places(self, chunk: Any) -> list[int]:
        values = chunk.buffers()[1]
        if values is None:
            raise MisalignedError
        return [_bitmap_of(chunk), _bits_from(values, chunk.offset)]

    def take(self, places: Places, which: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        values = _pack_bits(self.numbers(places, which, rows))
        return _array(self.kind, len(rows), _valid(places[0], which, rows), values)

    def numbers(
        self,
        places: Places,
        which: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Return rows as a NumPy array, in ``out`` if given; the values of nulls are arbitrary."""
        return _bits(places[1], which, rows, out)


class Sequences(Values):
    """Values of several items: lists, text, bytes.

    Attributes:
        inner: takes the items of a value; for text and bytes, single bytes.
        size: the number of items in each value, if the type fixes it.
    """

    def __init__(self, kind: Any, inner: Values) -> None:
        import pyarrow as pa

        super().__init__(kind)
        self.inner = inner
        types = pa.types
        is_large = types.is_large_list(kind) or (
            types.is_large_string(kind) or types.is_large_binary(kind)
        )
        self._ends = np.dtype(np.int64 if is_large else np.int32)
        self.size: int | None = kind.list_size if types.is_fixed_size_list(kind) else None
        self.is_text = types.is_string(kind) or types.is_large_string(kind)
        self.is_list = is_list(kind)
        self.width = 3 + (inner.width if self.is_list else 2)

    def places(self, chunk: Any) -> list[int]:
        buffers = chunk.buffers()
        if self.size is not None:
            inner = chunk.values
            return [_bitmap_of(chunk), chunk.offset, len(inner), *self.inner.places(inner)]
        offsets = buffers[1]
        if offsets is None or (offsets.address - _ORIGIN) % self._ends.itemsize:
            raise MisalignedError
        at = offsets.address + chunk.offset * self._ends.itemsize
        if self.is_list:
            inner = chunk.values
            if not len(inner):  # it may have no buffers at all, and nothing is read of it
                return [_bitmap_of(chunk), at, 0, *[NOWHERE] * self.inner.width]
            return [_bitmap_of(chunk), at, len(inner), *self.inner.places(inner)]
        data = buffers[2]
        size, begin = (0, 0) if data is None else (data.size, data.address)
        return [_bitmap_of(chunk), at, size, NOWHERE, begin]

    def take(self, places: Places, which: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        return self._taken(places, which, self.spans(places, which, rows))

    def _taken(self, places: Places, which: NDArray[np.int64], spans: Spans) -> Any:
        begins, lengths, valid = spans
        inner = self.inner.take_runs(places[3:], which, begins, lengths)
        ends = None
        if self.size is None:
            ends = np.zeros(len(lengths) + 1, self._ends)
            np.cumsum(lengths, out=ends[1:])
        if self.is_list:
            return _array(self.kind, len(lengths), valid, ends, children=[inner])
        return _array(self.kind, len(lengths), valid, ends, inner.buffers()[1])

    def spans(self, places: Places, which: NDArray[np.int64], rows: NDArray[np.int64]) -> Spans:
        """Return where values lie. Raises ValueError for one outside of its chunk's items."""
        valid = _valid(places[0], which, rows)
        if self.size is not None:
            begins = (rows + _each(places[1], which)) * self.size
            lengths = np.full(len(rows), self.size, np.int64)
        else:
            begins = _items(self._ends, places[1], which, rows).astype(np.int64)
            lengths = _items(self._ends, places[1], which, rows + 1) - begins
        if valid is not None and self.size is None:
            lengths *= valid  # a null may lie over anything
            begins *= valid
        outside = (lengths < 0) | (begins < 0)
        outside |= begins + lengths > _each(places[2], which)
        if outside.any():
            raise ValueError(f"a {self.kind} lies outside of its column's values: damaged data")
        return begins, lengths, valid

    def matrix(
        self, places: Places, which: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[Any] | None:
        """Return lists of numbers as one array ``[rows, length]``.

        None if a list is null, contains a null, or has another length than the others.
        """
        assert isinstance(self.inner, Numbers | Booleans)
        begins, lengths, valid = self.spans(places, which, rows)
        length = int(lengths.max(initial=0))
        if valid is not None or int(lengths.min(initial=length)) != length:
            return None
        if places[3].max() != NOWHERE:
            return None
        if isinstance(self.inner, Numbers):
            found = self.inner.runs(places[3:], which, begins, lengths)
        else:
            inner_rows = _numbers_of(begins, lengths)
            found = self.inner.numbers(places[3:], np.repeat(which, lengths), inner_rows)
        return found.reshape(len(rows), length)

    def texts(self, places: Places, which: NDArray[np.int64], rows: NDArray[np.int64]) -> list[Any]:
        """Return texts, or bytes, as Python objects. Each long value is copied once, by itself."""
        begins, lengths, valid = self.spans(places, which, rows)
        most = _SHORT_ITEMS if _library(len(rows)) is None else LONG_BYTES
        if int(lengths.sum()) <= most * len(lengths):
            short: list[Any] = self._taken(places, which, (begins, lengths, valid)).to_pylist()
            return short
        begins += _each(places[4] - _ORIGIN, which)
        memory = _bytes_of_memory()
        spans = zip(begins.tolist(), (begins + lengths).tolist(), strict=True)
        if self.is_text:
            values: list[Any] = [str(memory[begin:end], "utf-8") for begin, end in spans]
        else:
            values = [memory[begin:end].tobytes() for begin, end in spans]
        if valid is not None:
            for place in np.flatnonzero(~valid).tolist():
                values[place] = None
        return values


class Extended(Values):
    """Values of an extension type, taken from its storage."""

    def __init__(self, kind: Any, inner: Values) -> None:
        super().__init__(kind)
        self.inner = inner
        self.width = inner.width

    def places(self, chunk: Any) -> list[int]:
        return self.inner.places(chunk.storage)

    def take(self, places: Places, which: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        import pyarrow as pa

        return pa.ExtensionArray.from_storage(self.kind, self.inner.take(places, which, rows))


def values_of(kind: Any) -> Values | None:
    """Return an object that takes values of a type; None if only Arrow can."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        inner = values_of(kind.storage_type)
        return None if inner is None else Extended(kind, inner)
    if types.is_boolean(kind):
        return Booleans(kind)
    if is_number(kind):
        return Numbers(kind, np.dtype(kind.to_pandas_dtype()))
    if types.is_temporal(kind) and kind.bit_width in (32, 64):
        return Numbers(kind, np.dtype(f"i{kind.bit_width // 8}"))
    if is_text(kind):
        return Sequences(kind, Numbers(pa.uint8(), np.dtype(np.uint8)))
    if is_list(kind):
        inner = values_of(kind.value_type)
        return None if inner is None else Sequences(kind, inner)
    return None


def is_number(kind: Any) -> bool:
    """True if a type is of numbers, booleans included."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def is_text(kind: Any) -> bool:
    """True if a type is of text or bytes."""
    import pyarrow as pa

    types = pa.types
    is_string = types.is_string(kind) or types.is_large_string(kind)
    return bool(is_string or types.is_binary(kind) or types.is_large_binary(kind))


def is_list(kind: Any) -> bool:
    """True if a type is a list type, of any length."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _array(
    kind: Any, length: int, valid: Bools | None, *buffers: Any, children: list[Any] | None = None
) -> Any:
    """Return an Arrow array over NumPy's memory; a fixed-size list has no buffer, given as None."""
    import pyarrow as pa

    bitmap = None if valid is None else pa.py_buffer(_pack_bits(valid))
    rest = [
        pa.py_buffer(each) if isinstance(each, np.ndarray) else each
        for each in buffers
        if each is not None
    ]
    return pa.Array.from_buffers(kind, length, [bitmap, *rest], children=children)


def _bitmap_of(chunk: Any) -> int:
    """Return the address of the first bit of a chunk's null bitmap, if it has nulls."""
    return _bits_from(chunk.buffers()[0], chunk.offset) if chunk.null_count else NOWHERE


def _bits_from(buffer: Any, offset: int) -> int:
    return int(buffer.address * 8 + offset)


def _each(numbers: NDArray[np.int64], which: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a value for each row's chunk; for a single chunk, its only value."""
    return numbers if len(numbers) == 1 else numbers.take(which, mode="clip")


def _library(rows: int) -> ModuleType | None:
    return native.library() if rows >= _MANY_ROWS else None


def _items(
    dtype: np.dtype[Any],
    firsts: NDArray[np.int64],
    which: NDArray[np.int64],
    rows: NDArray[np.int64],
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Return an item of each row's chunk, in ``out`` if given."""
    library = _library(len(rows))
    if library is None:
        at = rows + _each((firsts - _ORIGIN) // dtype.itemsize, which)
        # "clip" spares NumPy a look at all places beforehand, and a buffer before ``out``.
        return _memory(dtype).take(at, out=out, mode="clip")
    found = np.empty(len(rows), dtype) if out is None else out
    library.gather_items(firsts[None], which, rows, found)
    return found


def _bits(
    firsts: NDArray[np.int64], which: NDArray[np.int64], rows: NDArray[np.int64], out: Any = None
) -> Bools:
    """Return a bit of each row's chunk, in ``out`` if given."""
    found: Bools = np.empty(len(rows), np.bool_) if out is None else out
    library = _library(len(rows))
    if library is None:
        at = _each(firsts, which) + rows
        bits = _memory(np.dtype(np.uint8)).take((at >> 3) - _ORIGIN, mode="clip")
        bits >>= (at & 7).astype(np.uint8)
        np.bitwise_and(bits, 1, out=found.view(np.uint8))
    else:
        library.gather_items(firsts[None], which, rows, found)
    return found


def _valid(
    bitmaps: NDArray[np.int64], which: NDArray[np.int64], rows: NDArray[np.int64]
) -> Bools | None:
    """Return which rows are not null; None if no row is null."""
    if bitmaps.max() == NOWHERE:
        return None
    if bitmaps.min() != NOWHERE:
        valid = _bits(bitmaps, which, rows)
    else:
        has_bitmap = (bitmaps != NOWHERE).take(which)
        valid = np.ones(len(rows), np.bool_)
        valid[has_bitmap] = _bits(bitmaps, which[has_bitmap], rows[has_bitmap])
    return None if valid.all() else valid


def _pack_bits(bits: Bools) -> NDArray[np.uint8]:
    return np.packbits(bits, bitorder="little")


def _numbers_of(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of all items of runs."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    numbers: NDArray[np.int64] = np.repeat(begins - (ends - lengths), lengths)
    numbers += np.arange(total)
    return numbers


class _Spanning:
    """The array interface of one item type over the whole memory of the process."""

    def __init__(self, typestr: str, step: int, itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (_ORIGIN, True),
            "typestr": typestr,
            "shape": ((_MEMORY_BYTES - itemsize) // step,),
            "strides": (step,),
        }


@functools.cache
def _memory(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the memory of this process as an array, read-only."""
    return np.asarray(_Spanning(dtype.str, dtype.itemsize, dtype.itemsize))


@functools.lru_cache(64)
def _memory_of_runs(dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    """Return an array in which each run of this many items in memory is one item."""
    size = math.prod((length, dtype.itemsize))
    return np.asarray(_Spanning(f"|V{size}", dtype.itemsize, size))


@functools.cache
def _bytes_of_memory() -> memoryview:
    return _memory(np.dtype(np.uint8)).data
