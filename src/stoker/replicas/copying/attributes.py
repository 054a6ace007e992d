"""Finds the attributes of objects, and the ones that held nothing when an epoch began."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Sequence
from typing import Any

from stoker.replicas.provenance import (
    cached_by_class,
    is_heap_class,
    is_users_class,
    is_users_function,
)
from stoker.replicas.thread_safety import ATOMS

_OBJECT: Any = object
_MISSING: Any = object()
# Containers with more elements hold data, not handles, and are not searched. Chosen, not measured.
_FEW = 64
# Each epoch begins with this search. The two limits on its objects (searched, and reached) keep it
# at microseconds.
_LOOKED_AT = 200
_MET = 2_000


def attributes_of(x: Any) -> dict[str, Any]:
    """Return an object's attributes: those in its table, then its slots'."""
    cls: Any = type(x)
    found = dict(getattr(x, "__dict__", ()))
    for name in _slots(cls):
        value = getattr(x, name, _MISSING)
        if value is not _MISSING:
            found[name] = value
    return found


@cached_by_class
def _slots(cls: Any) -> tuple[str, ...]:
    return tuple(
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and is_heap_class(base)
    )


@cached_by_class
def is_plainly_reduced(cls: Any) -> bool:
    """True if a class leaves pickling to Python: it defines no hook of its own."""
    own = getattr(object, "__getstate__", None)
    return (
        cls.__reduce_ex__ is _OBJECT.__reduce_ex__
        and cls.__reduce__ is _OBJECT.__reduce__
        and getattr(cls, "__getstate__", None) is own
        and not hasattr(cls, "__setstate__")
    )


@cached_by_class
def is_bare(cls: Any) -> bool:
    """True if a class is the user's, and its instances consist of a ``__dict__`` alone."""
    usual = ("__getattribute__", "__reduce_ex__", "__reduce__", "__dir__")
    unusual = ("__deepcopy__", "__del__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
    return (
        cls is not object
        and all(map(is_users_class, cls.__mro__[:-1]))
        and is_plainly_reduced(cls)
        and cls not in copyreg.dispatch_table
        and all(getattr(cls, name) is getattr(_OBJECT, name) for name in usual)
        and not any(hasattr(cls, name) for name in unusual)
        and not _slots(cls)
        and cls.__dictoffset__ != 0
        and "__dict__" not in _properties(cls)
        and not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)  # are shared
    )


def _properties(cls: Any) -> set[str]:
    return {
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, property)
    }


def is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class UnsetAttributes:
    """The attributes of the roots' objects that held nothing at one time."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._set: dict[int, tuple[Any, dict[str, bool]]] = {}
        todo = list(roots)
        seen: set[int] = set()
        while todo and len(self._set) < _LOOKED_AT and len(seen) < _MET:
            x = todo.pop()
            if type(x) in ATOMS or isinstance(x, type) or id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, (list, tuple)):
                if len(x) <= _FEW:
                    todo += x
                continue
            if isinstance(x, dict):
                if len(x) <= _FEW:
                    todo += x.values()
                continue
            if isinstance(x, types.FunctionType):
                if not is_users_function(x):
                    continue
                space = x.__globals__
                held = {name: space[name] for name in x.__code__.co_names if name in space}
                todo += [cell.cell_contents for cell in x.__closure__ or () if is_filled(cell)]
                key: Any = x
            elif isinstance(x, functools.partial):
                todo += [x.func, *x.args, *x.keywords.values()]
                continue
            elif isinstance(x, types.MethodType):
                todo.append(x.__self__)
                continue
            else:
                held = attributes_of(x)
                key = x
            self._set[id(x)] = (key, {name: value is not None for name, value in held.items()})
            todo += held.values()

    def was_unset(self, x: Any, name: str) -> bool:
        """True if an attribute (a function's global) was None or missing then."""
        known = self._set.get(id(x))
        return known is not None and known[0] is x and not known[1].get(name)

    def was_missing(self, x: Any, name: str) -> bool:
        """True if a searched object had no such attribute then."""
        return name not in self._set[id(x)][1]
