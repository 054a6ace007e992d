"""Digests of what a dataset holds: what moves when it is read, and what the script changes of it.

They cover numbers, texts, paths, containers, arrays and tensors in memory, the attributes of
objects, and of the user's own code its class attributes and the globals that it names. Of long
lists and large arrays they read a part. They are the same in another process of the same Python.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import marshal
import random
import sys
import types
from collections import deque
from pathlib import PurePath
from typing import Any

_ATOMS = {str, bytes, int, float, complex, bool, type(None)}
_NAMELESS = "its items or globals"
_WRAPPED = ("dataset", "datasets")
# Of ``Subset`` and its like. They are read whole: two halves differ in them alone.
_SELECTED = "indices"
# The deepest part that is read: cycles end there. The most parts: training waits. Chosen, not
# measured.
_MOST_DEPTH, _MOST_PARTS = 8, 4096
# Of a longer list of objects, so many at its ends are read; of plain values and of arrays, as many
# items and bytes as this, evenly spaced. 64 MiB take 70 ms, 100,000 pairs of a path and a label
# 20 ms.
_FEW, _MOST_ITEMS, _MOST_BYTES = 64, 100_000, 64 << 20
_INSTALLED = "site-packages", "dist-packages", types.__file__.removesuffix("types.py")


def digest_state(value: Any, *, draws: bool = True) -> str:
    """Return a digest of an object's state; without ``draws``, generators are left out."""
    return _Walk(draws).add_all(value)


def read_state(dataset: Any, *, draws: bool = True) -> dict[str, str]:
    """Return the digests of a dataset's attributes, by name, also of a dataset that it wraps."""
    found = {_NAMELESS: _Walk(draws, leaves_out=dataset).add_all(dataset)}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if name == "dataset":
            inner = read_state(value, draws=draws)
            found[_NAMELESS] += inner.pop(_NAMELESS)
            found |= {f"dataset.{each}": state for each, state in inner.items()}
        else:
            found[name] = digest_state(value, draws=draws)
    return found


def list_generators(value: Any) -> list[Any]:
    """Return the generators of Python, NumPy and torch that an object holds."""
    walk = _Walk(draws=True)
    walk.add_all(value)
    return walk.generators


def find_changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names of what differs."""
    names = before.keys() | after.keys()
    return sorted(name for name in names if before.get(name) != after.get(name))


def tell_changes(names: list[str]) -> str:
    """Return a sentence on what the script changes between epochs."""
    return f"the script changes its dataset between epochs ({', '.join(names)})"


def tell_moves(names: list[str]) -> str:
    """Return a sentence on what reading changes."""
    return f"reading its examples changes what the dataset holds ({', '.join(names)})"


class _Walk:
    """Adds the parts of an object to a digest."""

    def __init__(self, draws: bool, leaves_out: Any = None) -> None:
        """``leaves_out``: the object whose attributes are left out."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._draws, self._leaves_out = draws, leaves_out
        self._left = _MOST_PARTS
        self._seen: set[Any] = set()  # ids of functions, and classes
        self.generators: list[Any] = []

    def add_all(self, value: Any) -> str:
        """Add an object with its parts, and return the digest."""
        self._add_part(value, _MOST_DEPTH, is_data=True)
        return self._digest.hexdigest()

    def _add_part(self, value: Any, depth: int, *, is_data: bool = False) -> None:
        # Of an object that is neither data, a namespace, callable, nor the user's, the class alone.
        kind = type(value)
        self._add(f"\0{kind.__module__}.{kind.__qualname__}:")
        self._left -= 1
        if kind in _ATOMS or isinstance(value, PurePath):
            self._add(repr(value))
        elif depth == 0 or self._left < 0:
            return
        elif _is_of(value, "numpy", "ndarray") or _is_of(value, "torch", "Tensor"):
            self._add_array(value)
        elif _is_generator(value):
            self.generators.append(value)
            if self._draws:
                self._add(repr(read_generator(value)))
        elif isinstance(value, types.FunctionType):
            self._add_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._add_part(value.__func__, depth - 1)
            self._add_part(value.__self__, depth - 1, is_data=True)
        elif isinstance(value, functools.partial):
            self._add_part([value.func, value.args, value.keywords], depth - 1)
        elif isinstance(value, (type, types.BuiltinFunctionType)):
            self._add(value.__qualname__)
        else:
            self._add_items(value, depth, is_data)
            is_plain = kind is types.SimpleNamespace or _is_of(value, "argparse", "Namespace")
            if is_data or is_plain or callable(value) or _is_users(kind):
                self._add_object(value, depth)

    def _add_items(self, value: Any, depth: int, is_data: bool) -> None:
        if isinstance(value, (set, frozenset)):
            self._add_list(sorted(map(repr, value)), depth, False)
        elif isinstance(value, dict):
            self._add_list(list(value.items()), depth, is_data)
        elif isinstance(value, (list, tuple, deque, range)):
            self._add_list(value, depth, is_data)
        elif type(value).__module__ == "itertools":
            self._add(repr(value))  # that of count() tells its next number

    def _add(self, text: str) -> None:
        self._digest.update(text.encode("utf-8", "surrogatepass"))

    def _add_object(self, value: Any, depth: int) -> None:
        with contextlib.suppress(Exception):  # most callables have no length
            self._add(f"{len(value)}")
        kind = type(value)
        for each in kind.__mro__:
            if _is_users(each) and each not in self._seen:
                self._seen.add(each)
                for name, part in sorted(vars(each).items()):
                    if name[:2] != "__" or isinstance(part, types.FunctionType):
                        self._add_part(getattr(part, "__func__", part), depth - 1)
        if value is self._leaves_out:
            return
        attributes = dict(getattr(value, "__dict__", {}))
        for each in kind.__mro__:
            slots = vars(each).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                with contextlib.suppress(AttributeError):  # it is not set
                    attributes[name] = getattr(value, name)
        for name in sorted(attributes):
            self._add(f"\0{name}")
            if name == _SELECTED and type(attributes[name]) is list:
                with contextlib.suppress(ValueError):  # names, perhaps, of some class
                    self._digest.update(marshal.dumps(attributes[name], 2))
            self._add_part(attributes[name], depth - 1, is_data=name in _WRAPPED)

    def _add_function(self, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        if id(function) in self._seen:  # not its code: others of one factory hold other values
            return
        self._seen.add(id(function))
        self._digest.update(code.co_code)
        self._add(f"{code.co_name} {[each for each in code.co_consts if type(each) in _ATOMS]}")
        self._add_part([function.__defaults__, function.__kwdefaults__], depth - 1)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                self._add_part(cell.cell_contents, depth - 1)
        if not any(part in code.co_filename for part in _INSTALLED):
            for name in _list_globals(code):
                self._add_part(function.__globals__.get(name), depth - 1)

    def _add_list(self, values: Any, depth: int, is_data: bool) -> None:
        self._add(f"{len(values)}")
        if isinstance(values, range):
            return self._add(repr(values))
        if len(values) > _FEW:
            some: Any = list(values)[:: -(-len(values) // _MOST_ITEMS)]
            with contextlib.suppress(ValueError):  # something is no plain value
                # Version 2 says nothing about which values are the same object.
                return self._digest.update(marshal.dumps(some, 2))
            values = [*some[: _FEW // 2], *some[-_FEW // 2 :]]
        for each in values:
            self._add_part(each, depth - 1, is_data=is_data)

    def _add_array(self, array: Any) -> None:
        self._add(f"{array.dtype} {tuple(array.shape)}")
        numpy: Any = sys.modules["numpy"]
        if not isinstance(array, numpy.ndarray):
            try:
                array = array.detach()
                with contextlib.suppress(TypeError):  # NumPy has no bfloat16
                    array = array.numpy()
                if not isinstance(array, numpy.ndarray):
                    array = array.float().numpy()
            except (TypeError, RuntimeError):  # it is not in this process's memory, or sparse
                return
        if array.dtype.hasobject or isinstance(array, numpy.memmap):
            return
        step = max(1, -(-array.nbytes // _MOST_BYTES))
        rows = numpy.ascontiguousarray(array[::step] if array.ndim else array)
        self._digest.update(rows.reshape(-1).view(numpy.uint8).data)


def _is_generator(value: Any) -> bool:
    kinds = ("numpy.random", "RandomState"), ("numpy.random", "Generator"), ("torch", "Generator")
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return any(_is_of(value, *kind) for kind in kinds)


def read_generator(generator: Any) -> Any:
    """Return the state of a generator of Python, NumPy or torch; equal ones have equal ``repr``."""
    for read in ("getstate", "get_state"):
        if hasattr(generator, read):
            state = getattr(generator, read)()
            return state.tolist() if hasattr(state, "tolist") else state
    return generator.bit_generator.state


def restore_generator(generator: Any, state: Any) -> None:
    """Put a generator back into a state that ``read_generator`` gave."""
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif isinstance(state, list):
        torch: Any = sys.modules["torch"]
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    else:
        generator.set_state(state)


def _is_of(value: Any, module: str, name: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and isinstance(value, getattr(found, name))


def _is_users(kind: type) -> bool:
    """True if a class is the user's own code."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    known = kind.__module__ == "__main__" or bool(path)
    return known and not any(part in path for part in _INSTALLED)


@functools.cache
def _list_globals(code: types.CodeType) -> list[str]:
    loaded = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return sorted(loaded)
