"""Where the items are that a process has read and verified before, by the numbers of examples.

A second read of an item needs no key, no lookup in LMDB and no lock: its record stays where it is
in the store's file, which the process has mapped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.transport.codec.decoder import array_form
from stoker.transport.codec.record import BYTES_HEAD

# Forms of records; those from ``_ARRAY`` on are arrays of one shape and dtype each.
_ANY, _BYTES, _ARRAY = range(3)
# In place of a record's start, if it is unknown: no record begins where the file does.
_UNKNOWN = 0
# The most shapes and dtypes that are told apart: as many as the decoder keeps.
_MAX_FORMS = 256
# The most bytes that an array may seem to have, see ``Places._arrays``. NumPy allows 2^63.
_MAX_BYTES = 1 << 62


class Places:
    """The places of items in a store's file, in one process. Any thread may use it.

    Args:
        memory: the file, as mapped.
        examples: the number of examples. More may come.
    """

    def __init__(self, memory: memoryview, examples: int) -> None:
        self._memory = memory
        # Start, size and form of each example's record.
        self._records = np.zeros((examples, 3), np.int64)
        self._forms: dict[bytes, int] = {}  # by the head of the record
        # For each form, an array of arrays, of which one begins at each byte of the file: indexing
        # it takes a third of the time of a new view of a buffer.
        self._arrays: list[NDArray[Any]] = []
        self._lock = threading.Lock()  # for writers

    def add(self, number: int, start: int, size: int, value: Any) -> None:
        """Remember where the record of an example is, and that ``value`` was decoded of it."""
        with self._lock:
            if number >= len(self._records):  # the dataset has grown
                extra = number + 1 - len(self._records) + len(self._records) // 2
                self._records = np.concatenate([self._records, np.zeros((extra, 3), np.int64)])
            is_bytes = type(value) is bytes
            form = _BYTES if is_bytes else self._form(self._memory[start : start + size])
            record = self._records[number]
            record[1:] = size, form
            record[0] = start  # last, since readers take no lock and look at it first

    def _form(self, record: memoryview) -> int:
        found = array_form(record)
        if found is None:
            return _ANY
        head, shape, dtype = found
        form = self._forms.get(head)
        if form is None:
            contiguous: NDArray[Any] = np.ndarray(shape, dtype, self._memory)
            rows = len(self._memory) - len(head) - contiguous.nbytes + 1
            # Indexing would make a number of what has no axes.
            if (
                not shape
                or len(self._arrays) >= _MAX_FORMS
                or rows * contiguous.nbytes > _MAX_BYTES
            ):
                return _ANY
            form = _ARRAY + len(self._arrays)
            strides = (1, *contiguous.strides)
            arrays = np.ndarray((rows, *shape), dtype, self._memory, len(head), strides)
            self._arrays.append(arrays)
            self._forms[head] = form
        return form

    def find_one(self, number: int) -> tuple[Any, int] | None:
        """Return an array or bytes, which the caller owns, and the bytes of its record.

        None for other values, and for examples that are not known.
        """
        if not 0 <= number < len(self._records):
            return None
        start, size, form = self._records[number].tolist()
        if start == _UNKNOWN or form == _ANY:
            return None
        if form == _BYTES:
            return bytes(self._memory[start + len(BYTES_HEAD) : start + size]), size
        return self._arrays[form - _ARRAY][start].copy(), size

    def find(
        self, numbers: NDArray[np.int64], read: Callable[[memoryview], Any], *, lends: bool
    ) -> tuple[list[Any], int, list[int]]:
        """Return items, the bytes of their records, and which of them are unknown: those are None.

        Args:
            numbers: the numbers of the examples.
            read: decodes a record.
            lends: whether arrays are views of the file. Otherwise the caller owns the items.
        """
        try:
            starts, sizes, forms = self._records[numbers].T.tolist()
        except IndexError:  # the dataset has grown
            return [None] * len(numbers), 0, list(range(len(numbers)))
        form = forms[0] if forms else _ANY
        if form >= _ARRAY and forms.count(form) == len(forms) and _UNKNOWN not in starts:
            arrays = self._arrays[form - _ARRAY]
            found = [arrays[start] for start in starts]
            return found if lends else [each.copy() for each in found], sum(sizes), []
        values = []
        for start, size, form in zip(starts, sizes, forms, strict=True):
            if start == _UNKNOWN:
                value = None
            elif form == _BYTES:
                value = bytes(self._memory[start + len(BYTES_HEAD) : start + size])
            elif form == _ANY:
                value = read(self._memory[start : start + size])
            else:
                value = self._arrays[form - _ARRAY][start]
                if not lends:
                    value = value.copy()
            values.append(value)
        known_bytes = sum(size for start, size in zip(starts, sizes, strict=True) if start)
        return values, known_bytes, [at for at, start in enumerate(starts) if start == _UNKNOWN]
