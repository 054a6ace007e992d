"""Finds what a user's objects hold, wherever they keep it: generators, and open connections.

It looks at what objects consist of, and runs none of their code: attributes and slots, what classes
share, items of containers, closures, defaults, what ``partial`` and methods are bound to, and the
globals that functions name. Modules are not followed, nor is the code of installed packages, which
would lead into all of them; objects of installed packages are.

Values are looked at in groups, by type: a list of a million paths costs one pass over the types.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from stoker.basics.generators import SeededGenerator, generator_of, kind_of_generators
from stoker.schedule.rng import AddressedGenerator

# Items of larger containers are looked at together, and have no numbers in paths.
_ONE_BY_ONE = 64
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_BOUND = (types.MethodType, types.BuiltinMethodType)
_WRAPPERS = (classmethod, staticmethod, property, functools.cached_property)
_CODE = (types.FunctionType, type, *_WRAPPERS)
_IN_PYTHON = 1 << 9  # a flag of classes: Py_TPFLAGS_HEAPTYPE
_PARTS = ("__self__", "__func__", "fget", "fset", "func")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def find_generators(objects: Iterable[Any]) -> list[SeededGenerator]:
    """Return the generators that objects hold, each once, in an order that is always the same.

    Those of ``random``, ``numpy.random`` and torch themselves are not held by anybody.
    """
    search = _Search()
    for each in objects:
        search.visit(each)
    return search.found


def find_connections(objects: Iterable[Any]) -> list[str]:
    """Return where objects hold sockets and running programs.

    Processes that are forked with them would share them, and take each other's answers.
    """
    search = _Search()
    for each in objects:
        search.visit(each)
    return search.connections


class _Search:
    """A search, breadth first: paths are as short as they can be, and cycles end."""

    def __init__(self) -> None:
        self.found: list[SeededGenerator] = []
        self.connections: list[str] = []
        self._left: deque[tuple[Sequence[Any], str]] = deque()
        self._seen: dict[int, Any] = {}  # with the objects: an id may be used again otherwise
        self._may_hold: dict[type, bool] = {}

    def visit(self, value: Any) -> None:
        is_named = isinstance(value, (type, types.FunctionType, *_BOUND))
        attributes = {} if is_named else _dict_of(value) or {}
        name = value.__name__ if is_named else attributes.get("__name__", type(value).__name__)
        self._add(value, name)
        while self._left:
            values, path = self._left.popleft()
            for kind in self._worth_it(values):
                self._look_at(kind, [each for each in values if type(each) is kind], path)

    def _add(self, value: Any, path: str) -> None:
        self._left.append(([value], path))

    def _worth_it(self, values: Iterable[Any]) -> list[type]:
        """Return the types among values whose objects may hold others, or are generators."""
        kinds = set(map(type, values))
        for kind in kinds - self._may_hold.keys():
            self._may_hold[kind] = _may_hold(kind)
        # Sets have no order of their own; names of types do.
        worth = filter(self._may_hold.__getitem__, kinds)
        return sorted(worth, key=lambda kind: (kind.__module__, kind.__qualname__))

    def _new(self, values: Sequence[Any]) -> list[Any]:
        """Return those that were not looked at before."""
        new = {id(value): value for value in values if id(value) not in self._seen}
        self._seen.update(new)
        return list(new.values())

    def _look_at(self, kind: type, values: Sequence[Any], path: str) -> None:
        """Look at objects of one type, which are found in the same place."""
        if issubclass(kind, _connections()):
            self.connections.append(path)
        elif kind_of_generators(kind) is not None:
            wrapped = [generator_of(value, path) for value in self._new(values)]
            self.found += [each for each in wrapped if each is not None]
        elif issubclass(kind, (*_CONTAINERS, np.ndarray)):
            self._items(kind, values, path)
        elif issubclass(kind, types.FunctionType):
            for function in self._new(values):
                self._function(function, path)
        elif issubclass(kind, type):
            for cls in values:
                self._class(cls, path)
        elif issubclass(kind, (*_BOUND, *_WRAPPERS)):
            for each in values:
                for part in _PARTS:
                    self._add(getattr(each, part, None), path)
        elif issubclass(kind, functools.partial):
            for each in values:
                self._add(each.func, path)
                self._add((*each.args, *each.keywords.values()), f"{path}'s arguments")
        self._attributes(kind, values, path)

    def _items(self, kind: type, values: Sequence[Any], path: str) -> None:
        if issubclass(kind, np.ndarray):
            kind, values = list, [v.ravel().tolist() for v in values if v.dtype.hasobject]
        base: Any = next(each for each in _CONTAINERS if issubclass(kind, each))
        of_one = dict.values if base is dict else base.__iter__  # not the user's own

        def items() -> Iterator[Any]:
            return itertools.chain.from_iterable(map(of_one, values))

        if not self._worth_it(items()) or not self._new(values):
            return
        if len(values) > 1 or base.__len__(values[0]) > _ONE_BY_ONE:
            self._left.append((list(items()), f"{path}[...]"))
            return
        names = base.__iter__(values[0]) if base is dict else itertools.count()
        for name, item in zip(names, items()):  # noqa: B905 (a count has no end)
            self._add(item, f"{path}[{name!r}]")

    def _attributes(self, kind: type, values: Sequence[Any], path: str) -> None:
        """Look at what objects hold under names; no property is asked, and no ``__getattr__``."""
        self._class(kind, kind.__name__)
        dicts = [*filter(None, map(_dict_of, values))] if kind.__dictoffset__ else []
        if self._worth_it(itertools.chain.from_iterable(map(dict.values, dicts))) and self._new(
            dicts
        ):
            for name in dict.fromkeys(itertools.chain.from_iterable(dicts)):
                self._left.append(([d[name] for d in dicts if name in d], f"{path}.{name}"))
        slots = list(_slots(kind))
        contents = [[_content(slot, value) for value in values] for slot in slots]
        if self._worth_it(itertools.chain.from_iterable(contents)) and self._new(values):
            for slot, held in zip(slots, contents, strict=True):
                self._left.append((held, f"{path}.{slot.__name__}"))

    def _class(self, cls: type, path: str) -> None:
        """Look at what a class holds for all of its objects, and at the code of its methods."""
        for base in self._new(cls.__mro__):
            if not base.__flags__ & _IN_PYTHON:
                continue
            is_users = _is_users(base.__module__)
            for name, value in vars(base).items():
                is_named = name[:2] != "__"  # others that are no methods describe the class
                if (
                    (is_named or callable(value))
                    if is_users
                    else is_named and not isinstance(value, _CODE)
                ):
                    self._add(value, f"{path}.{name}")

    def _function(self, function: Any, path: str) -> None:
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        by_name = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        for name, value in (by_name | (function.__kwdefaults__ or {})).items():
            self._add(value, f"{path}'s default `{name}`")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():  # not assigned yet
                self._add(cell.cell_contents, f"{path}'s variable `{name}`")
        if _is_users(function.__module__):
            for name, value in _globals_of(function):
                self._add(value, f"{path}'s global `{name}`")


def _connections() -> tuple[type, ...]:
    """Return the types of connections, as far as the program has imported them."""
    found = (
        getattr(sys.modules.get(module), name, None)
        for module, name in (
            ("socket", "socket"),
            ("subprocess", "Popen"),
        )
    )
    return tuple(each for each in found if isinstance(each, type))


def _may_hold(kind: type) -> bool:
    """Return whether objects of a type may hold others that can be found, or are generators."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if issubclass(kind, (types.ModuleType, os.PathLike, AddressedGenerator)):
        return False
    if tensor is not None and issubclass(kind, tensor):
        return False
    if kind_of_generators(kind) is not None or issubclass(kind, (*_CONTAINERS, np.ndarray)):
        return True
    if issubclass(kind, (*_CODE, *_BOUND, functools.partial)) or kind.__dictoffset__:
        return True
    return any(_slots(kind)) or _is_users(kind.__module__)


def _dict_of(value: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            yield from (
                each for each in vars(base).values() if type(each) is types.MemberDescriptorType
            )


def _content(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # it is empty
        return None


def _is_users(module_name: object) -> bool:
    """Return whether a module is neither of an installed package, nor of Python, nor stoker."""
    if not isinstance(module_name, str) or module_name.partition(".")[0] == "stoker":
        return not isinstance(module_name, str)
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None:  # built in; or typed in, as in a notebook
        return getattr(module, "__spec__", None) is None
    return not file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)


def _globals_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function's code names, and what it may take from modules."""
    names = dict.fromkeys(_names_in(function.__code__))
    for name in names:
        value = function.__globals__.get(name, sys.modules.get(name))
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif _is_users(value.__name__):
            named = vars(value)
            yield from ((f"{name}.{each}", named[each]) for each in names if each in named)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
