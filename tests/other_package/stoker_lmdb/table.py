"""The values of an LMDB table, in the order of their keys."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import lmdb

import stoker
from stoker.sources import Fingerprint, Indices


class Opened:
    """An open table. LMDB opens one only once in a process; forked children read it, too."""

    def __init__(self, path: str) -> None:
        self.environment = lmdb.open(path, readonly=True, lock=False, readahead=False)


_lock = threading.Lock()
_opened: weakref.WeakValueDictionary[str, Opened] = weakref.WeakValueDictionary()


def opened(path: str) -> Opened:
    with _lock:
        found = _opened.get(path)
        if found is None:
            found = _opened[path] = Opened(path)
        return found


@stoker.thread_safe
class LmdbTable(stoker.Source[Any]):
    """The values of a table, in the order of their keys; threads share its environment.

    Args:
        path: the folder of the table.
        decode: called with a key and its value, by several threads at once; None: the values.
    """

    def __init__(self, path: str, decode: Callable[[bytes, bytes], Any] | None = None) -> None:
        self._path = os.path.realpath(path)
        self._decode = decode
        self._table = opened(self._path)
        with self._table.environment.begin() as transaction:
            self._keys = list(transaction.cursor().iternext(values=False))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_table": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _table=opened(state["_path"]))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int, /) -> Any:
        return self.fetch([index])[0]

    def fetch(self, indices: Indices) -> list[Any]:
        keys = [self._keys[index] for index in indices]
        with self._table.environment.begin() as transaction:
            values = [transaction.get(key) for key in keys]
        return [self._decoded(key, value) for key, value in zip(keys, values, strict=True)]

    def _decoded(self, key: bytes, value: bytes | None) -> Any:
        if value is None:
            raise KeyError(f"{key!r} is not in the table any more")
        return value if self._decode is None else self._decode(key, value)

    @property
    def name(self) -> str:
        return f"from_lmdb({self._path!r})"

    def path(self, index: int) -> str:
        return f"{self._path}, key {self._keys[index]!r}"

    def name_of(self, index: int) -> str:
        return self._keys[index].hex()

    def identity(self) -> str:
        decode = "" if self._decode is None else self._decode.__qualname__
        return f"lmdb {self._path} {decode}"

    def fingerprint(self, index: int) -> Fingerprint:
        file = os.stat(os.path.join(self._path, "data.mdb"))
        return Fingerprint(self._keys[index], file.st_size, file.st_mtime_ns)


def from_lmdb(
    path: str,
    decode: Callable[[bytes, bytes], Any] | None = None,
    *,
    seed: int | None = None,
    max_errors: int | str = 0,
) -> stoker.Pipeline[Any]:
    return stoker.from_dataset(LmdbTable(path, decode), seed=seed, max_errors=max_errors)


def write_lmdb(path: str, items: Iterable[tuple[bytes, bytes]]) -> None:
    """Write a table; what it has under other keys stays."""
    with lmdb.open(path, map_size=1 << 26) as environment, environment.begin(write=True) as writing:
        for key, value in items:
            writing.put(key, value)
