"""The identity of a dataset's examples, on which the processes of one run agree.

They have the same code, so the state of the dataset decides, with its arrays and indices. What
cannot be written down, such as an open file, makes the examples this process's own.
"""

from __future__ import annotations

import pickle
import secrets
import sys
import types
from typing import Any

import xxhash

from stoker.basics import pytree


def identify_examples(dataset: Any) -> str:
    """Return a text that is the same for datasets with the same examples, also in other processes.

    A random one if something about the dataset cannot be known.
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
