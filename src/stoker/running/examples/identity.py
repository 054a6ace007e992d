"""The identity of a dataset's examples, which concurrent runs agree on.

It takes in all that makes the examples: the dataset's state with its arrays and indices, the code
of its classes and functions, the globals that they name, the versions of their packages, and the
stamps of files. What cannot be taken in makes the examples this process's own. It is not for stores
that stay: a file that is rewritten in place may keep its stamp's place in a sample.
"""

from __future__ import annotations

import itertools
import os
import pickle
import platform
import secrets
import sys
import types
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import xxhash

from stoker.basics import pytree

# Paths whose files are looked at: training waits, and a stamp on a network takes up to 1 ms.
_MOST_PATHS = 1000
_DEEPEST = 6
_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__) + os.sep)


def identify_examples(dataset: Any) -> str:
    """Return a text that is the same for datasets with the same examples, also in other runs.

    A random one if something about the dataset cannot be known.
    """
    hasher = xxhash.xxh3_128()
    try:
        _StatePickler(_HashedFile(hasher)).dump(dataset)
    except Exception:  # whatever the state's own code raises
        return f"own {secrets.token_hex(16)}"
    for stamp in _list_stamps(dataset):
        hasher.update(stamp.encode("utf-8", "surrogatepass"))
    where = f"{platform.python_version()} {os.getcwd()} {len(dataset)}"
    return f"examples {type(dataset).__qualname__} {where} {hasher.hexdigest()}"


class _HashedFile:
    """A file whose content is only hashed."""

    def __init__(self, hasher: Any) -> None:
        self.write = hasher.update


class _StatePickler(pickle.Pickler):
    """Writes the state of objects, and code in place of names. Nothing reads it."""

    def __init__(self, file: _HashedFile) -> None:
        super().__init__(file, protocol=5)
        self.fast = True  # by value: equal texts need not be one object
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # an id is taken while its object lives

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "builtins" and isinstance(value, type):
            return NotImplemented  # by its name
        if isinstance(value, (type, types.FunctionType)) and not _is_users(value):
            return tuple, ([value.__module__, value.__qualname__, _version_of(value)],)
        if isinstance(value, types.FunctionType):
            return tuple, (self._once(value, _describe_function),)
        if isinstance(value, type):
            return tuple, (self._once(value, _describe_class),)
        if isinstance(value, types.ModuleType):
            return tuple, ([value.__name__, getattr(value, "__version__", "")],)
        if pytree.is_tensor(value):
            stride = list(value.stride())
            return tuple, ([str(value.dtype), list(value.shape), stride, _hash_tensor(value)],)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            return tuple, ([value.dtype.str, value.shape, xxhash.xxh3_128_digest(content)],)
        return NotImplemented

    def _once(self, value: Any, describe: Any) -> list[Any]:
        if id(value) in self._seen:
            return [value.__module__, value.__qualname__]
        self._seen.add(id(value))
        self._kept.append(value)
        parts: list[Any] = describe(value)
        self._kept.append(parts)
        return parts


def _is_users(value: Any) -> bool:
    """True if a class or function is the user's own code."""
    if isinstance(value, types.FunctionType):
        if "<" in value.__qualname__:
            return True  # nothing but its code tells it from others
        path = value.__code__.co_filename
    else:
        module = sys.modules.get(value.__module__)
        path = getattr(module, "__file__", None) or ""
        if not path and value.__module__ != "__main__":
            return False  # built in
    return not any(part in path for part in _INSTALLED) or path[:1] == "<"


def _version_of(value: Any) -> str:
    package = sys.modules.get((value.__module__ or "").partition(".")[0])
    return str(getattr(package, "__version__", ""))


def _describe_function(function: types.FunctionType) -> list[Any]:
    names: set[str] = set()
    code = list(_list_code(function.__code__, names))
    known = function.__globals__
    used: list[Any] = []
    for name in sorted(names & known.keys()):
        value = known[name]
        used.append((name, value))
        if isinstance(value, types.ModuleType) and _is_users_module(value):
            used += [(key, vars(value)[key]) for key in sorted(names & vars(value).keys())]
    if names & {"environ", "getenv", "argv"}:
        used.append((dict(os.environ), sys.argv))
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [
        function.__qualname__,
        code,
        function.__defaults__,
        function.__kwdefaults__,
        cells,
        used,
    ]


def _is_users_module(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None) or ""
    return bool(path) and not any(part in path for part in _INSTALLED)


def _list_code(code: types.CodeType, names: set[str]) -> Iterator[Any]:
    names.update(code.co_names)
    yield code.co_code
    yield code.co_names, code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_code(constant, names)
        elif isinstance(constant, frozenset):
            yield sorted(map(repr, constant))
        else:
            yield constant


def _describe_class(kind: type) -> list[Any]:
    parts: list[Any] = [kind.__module__, kind.__qualname__, list(kind.__bases__)]
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            parts += [name, value.fget]
        elif not name.startswith("__") or isinstance(value, types.FunctionType):
            parts += [name, value]
    return parts


def _hash_tensor(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
    return xxhash.xxh3_128_digest(flat.numpy().data)


def _list_stamps(dataset: Any) -> Iterator[str]:
    """Yield the stamps of files and folders that an object names, and of those around them."""
    paths = list(dict.fromkeys(_list_paths(dataset, _DEEPEST)))
    some = paths[:: -(-len(paths) // _MOST_PATHS)] if paths else []
    for path in dict.fromkeys([*some, *map(os.path.dirname, some)]):
        try:
            found = os.stat(path or ".")
        except (OSError, ValueError):
            continue  # a text that is no path
        yield f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ino}\0"


def _list_paths(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, (str, PurePath)):
        text = os.fspath(value)
        if len(text) < 4096 and "\n" not in text:
            yield text
    elif depth == 0 or isinstance(value, (type, types.ModuleType)):
        return
    elif isinstance(value, dict):
        for each in value.values():
            yield from _list_paths(each, depth - 1)
    elif isinstance(value, (list, tuple)):
        for each in itertools.islice(value, 0, None, max(1, len(value) // _MOST_PATHS)):
            yield from _list_paths(each, depth - 1)
    else:
        for each in getattr(value, "__dict__", {}).values():
            yield from _list_paths(each, depth - 1)
