"""A dataset whose examples are kept, for the workers of a changed loader.

The script sees its own dataset everywhere. In a worker, ``get_worker_info().dataset`` is this one,
which answers as the script's does.
"""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import secrets
import shutil
import sys
import types
import warnings
from typing import Any

import xxhash

from stoker.adapters.cached_dataset import CachedDataset
from stoker.basics import pytree
from stoker.basics.fingerprint import Fingerprint
from stoker.basics.resources import usable_memory_bytes
from stoker.cache.example_cache import ExampleCache
from stoker.cache.location import LEAST_BYTES, memory_folder
from stoker.cache.store import MISSING
from stoker.errors import CacheError, CacheWarning
from stoker.transport.codec import decode, encode

# As with ``limit="auto"`` (cache/location.py).
_MEMORY = 0.5
# What an example takes in the store beside its record, as in the advice, and other sizes of those
# that were not tried.
_BESIDE_BYTES, _MORE = 512, 1.1


def plan_bytes(example_bytes: float, count: int) -> int:
    """Return the bytes of a store for the examples, or for as many as there is room for; 0 if for
    none."""
    room = min(
        _MEMORY * usable_memory_bytes(),
        0.9 * shutil.disk_usage(os.path.dirname(memory_folder())).free,
    )
    whole = LEAST_BYTES * 2 + _MORE * count * (example_bytes + _BESIDE_BYTES)
    found = int(min(whole, room)) >> 20 << 20
    return found if found >= LEAST_BYTES else 0


def is_cached(dataset: Any) -> bool:
    """True if a dataset, or one that it wraps, is cached by its script."""
    for _ in range(8):
        if isinstance(dataset, CachedDataset):
            return True
        dataset = vars(dataset).get("dataset") if hasattr(dataset, "__dict__") else None
    return False


def find_record(value: Any) -> bytes | None:
    """Return an example's record; None if it would not be the same value again.

    Tensors may have other strides.
    """
    try:
        record = b"".join(encode(value))
        return record if pytree.equal(decode(memoryview(record)), value) else None
    except (TypeError, ValueError, LookupError):
        return None


def identify_examples(dataset: Any) -> str:
    """Return a text that is the same for datasets with the same examples, also in other processes.

    A run's processes have the same code, so the state of the dataset decides, with its arrays and
    indices. A random one if something about it cannot be written down, such as an open file.
    """
    hasher = xxhash.xxh3_128()
    try:
        _StatePickler(_HashedFile(hasher)).dump(dataset)
    except Exception:  # whatever the state's own code raises
        return f"own {secrets.token_hex(16)}"
    return f"{type(dataset).__qualname__} of {len(dataset)} {hasher.hexdigest()}"


class _HashedFile:
    """A file whose content is only hashed."""

    def __init__(self, hasher: Any) -> None:
        self.write = hasher.update


class _StatePickler(pickle.Pickler):
    """Writes the state of objects. Nothing reads it."""

    def __init__(self, file: _HashedFile) -> None:
        super().__init__(file, protocol=5)
        self.fast = True  # by value: equal texts need not be one object

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            line = value.__code__.co_firstlineno
            name = [value.__module__, value.__qualname__, line, value.__code__.co_code]
            return tuple, ([*name, value.__defaults__, value.__kwdefaults__, cells],)
        if isinstance(value, type) and value.__module__ != "builtins":
            return str, (f"{value.__module__}.{value.__qualname__}",)
        if pytree.is_tensor(value):
            flat = value.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
            kind = [str(value.dtype), list(value.shape), list(value.stride())]
            return tuple, ([*kind, flat.numpy()],)
        return NotImplemented


class KeptExamples(CachedDataset):
    """A dataset behind a store that a run's ranks share. It refuses nothing, and draws nothing.

    What cannot be stored is read each time.
    """

    def __init__(self, dataset: Any, limit_bytes: int, identity: str) -> None:
        """Raises CacheError, OSError."""
        cache = ExampleCache(
            limit_bytes,
            path=None,
            keep=None,
            identity=identity,
            describes=f"{type(dataset).__name__} of {len(dataset)}",
            examples=len(dataset),
        )
        with warnings.catch_warnings():
            # Another rank has made it with another size; or it is smaller than was planned.
            warnings.simplefilter("ignore", CacheWarning)
            cache.open()
        super().__init__(dataset, cache)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._dataset)

    def __reduce__(self) -> Any:
        return _again, (self._dataset, self._cache)

    def around(self, dataset: Any) -> KeptExamples:
        """Return another dataset with the same examples behind this store."""
        return _again(dataset, self._cache)

    def __getitems__(self, indices: Any) -> list[Any]:
        cache = self._cache
        names = [
            operator.index(index) if hasattr(index, "__index__") else repr(index)
            for index in indices
        ]
        try:
            found = self._find(names)
        except CacheError:
            return self._read(list(indices))
        missing = [at for at, value in enumerate(found) if value is MISSING]
        if missing:
            values = self._read([indices[at] for at in missing])
            for at, value in zip(missing, values, strict=True):
                found[at], name = value, names[at]
                with contextlib.suppress(CacheError):
                    if cache.takes and find_record(value) is not None:
                        cache.offer(cache.key(Fingerprint(name), name), value)
        return found


def _again(dataset: Any, cache: ExampleCache) -> KeptExamples:
    found = KeptExamples.__new__(KeptExamples)
    CachedDataset.__init__(found, dataset, cache)
    return found
