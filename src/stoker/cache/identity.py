"""Identities of cached items: of the source, of the stages before the cache, and of the file.

Examples that only their numbers identify are found faster: a process makes each key once, and
remembers where in the store's file the items are that it has read and verified. Reading one of
these again takes no key, no lookup in LMDB and no lock.

A key is a digest of the chain's identity and the example's fingerprint. A chain has an identity if
its source has one and all functions before the cache are stoker's own, or if the user gives a
version. Otherwise the identity is random, made with the stage and pickled with it. A file's
fingerprint is taken before and after the file is read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint, content_digest
from stoker.cache.layout import KEY_BYTES
from stoker.transport.codec import BYTES_HEAD, array_form

_OWN = "stoker."
# Forms of records; those from ``_ARRAY`` on are arrays of one shape and dtype each.
_ANY, _BYTES, _ARRAY = range(3)
# In place of a record's start, if it is unknown: no record begins where the file does.
_UNKNOWN = 0
# The most shapes and dtypes that are told apart: as many as the decoder keeps.
_MAX_FORMS = 256
# The most bytes that an array may seem to have, see ``ItemPlaces._arrays``. NumPy allows 2^63.
_MAX_BYTES = 1 << 62
_ENCODER = msgspec.msgpack.Encoder()


def chain_identity(source: Any, maps: Iterable[Any], version: str | None) -> str | None:
    """Return an identity of a chain's source and functions; None if stoker cannot know it.

    Without a ``version`` it is known only if the source has an identity and all functions are
    stoker's own: other functions may change, and a dataset object says nothing about its data. A
    ``version`` of the user's vouches for the data and for code that the functions call; digests of
    the functions themselves are part of the identity.
    """
    source_identity = identity = source.identity()
    names = []
    for stage in maps:
        module = getattr(stage.fn, "__module__", "") or ""
        name = getattr(stage.fn, "__qualname__", "")
        digest_part = "" if version is None else f" {content_digest(stage.fn)}"
        names.append(f"{stage.name}:{module}.{name}{digest_part}")
        if not module.startswith(_OWN) or not name or "<" in name:
            identity = None
    if version is None:
        return None if identity is None else "\0".join(["chain", identity, *names])
    return "\0".join(
        [
            "version",
            version,
            source_identity or f"{source.name} of {len(source)} {source.contents()}",
            *names,
        ]
    )


def item_key(chain: bytes, fingerprint: Fingerprint) -> bytes:
    """Return the 16 bytes of an item's key; ``chain`` is the digest of the chain's identity."""
    name = fingerprint.name
    if isinstance(name, str):
        fingerprint = fingerprint._replace(name=os.fsencode(name))
    return xxhash.xxh3_128_digest(chain + _ENCODER.encode(fingerprint))


def digest(identity: str) -> bytes:
    """Return the 16-byte digest of an identity."""
    return xxhash.xxh3_128_digest(identity.encode("utf-8", "surrogateescape"))


class NumberedKeys:
    """The keys of examples that only their numbers identify; each is made once. Thread-safe."""

    def __init__(self, examples: int) -> None:
        self._keys_and_flags = np.zeros(examples, f"V{KEY_BYTES}"), np.zeros(examples, bool)

    def of(
        self, indices: NDArray[np.int64], make: Callable[[Fingerprint, int], bytes]
    ) -> list[Any]:
        """Return the keys of examples; ``make(fingerprint, index)`` makes a missing one."""
        keys, known = self._keys_and_flags
        try:
            is_known = known[indices]  # checking with max() first would cost 2 us a batch
        except IndexError:  # the dataset has grown
            extra = int(indices.max()) + 1 - len(keys) + len(keys) // 2
            known = np.concatenate([known, np.zeros(extra, bool)])
            keys = np.concatenate([keys, np.zeros(extra, keys.dtype)])
            self._keys_and_flags = keys, known
            is_known = known[indices]
        if not is_known.all():
            for index in indices[~is_known].tolist():
                keys[index] = make(Fingerprint(index), index)
                known[index] = True  # after the key: other threads read the flag first
        found: list[Any] = keys[indices].tolist()
        return found


class ItemPlaces:
    """The places of items in a store's file, in one process. Any thread may use it.

    Args:
        memory: the file, as mapped.
        examples: the number of examples. More may come.
        ask_for: told where records are, by their starts and sizes, before these are read.
    """

    def __init__(
        self,
        memory: memoryview,
        examples: int,
        ask_for: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self._memory = memory
        self._ask_for = ask_for
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

    def read_ahead(self, numbers: NDArray[np.int64]) -> None:
        """Ask for the known records among these."""
        starts, sizes, _ = self._records[numbers[numbers < len(self._records)]].T.tolist()
        self._ask_for(starts, sizes)

    def find_one(self, number: int) -> tuple[Any, int] | None:
        """Return an array or bytes, which the caller owns, and the bytes of its record.

        None for other values, and for examples that are not known.
        """
        if not 0 <= number < len(self._records):
            return None
        start, size, form = self._records[number].tolist()
        if start == _UNKNOWN or form == _ANY:
            return None
        self._ask_for([start], [size])
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
        self._ask_for(starts, sizes)
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
