"""Takes classes and functions apart: methods, wrapped functions, variables, defaults."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from stoker.replicas.provenance import cached_by_class, is_heap_class, is_users_function
from stoker.replicas.thread_safety import LruCached

_USUALLY_FOUND: Any = object.__getattribute__


def functions_of(member: Any, name: str) -> Iterable[tuple[types.FunctionType, bool]]:
    """Yield the functions of a class's member, and whether each is given the class."""
    if isinstance(member, staticmethod):
        yield from ((f, name == "__new__") for f, _ in functions_of(member.__func__, ""))
    elif isinstance(member, classmethod):
        yield from ((f, True) for f, _ in functions_of(member.__func__, ""))
    elif isinstance(member, types.FunctionType):
        for inner in with_wrapped(member):
            yield inner, name in ("__new__", "__class_getitem__")
    elif isinstance(member, property):
        for each in (member.fget, member.fset, member.fdel):
            if isinstance(each, types.FunctionType):
                yield each, False
    elif isinstance(member, (functools.cached_property, functools.partialmethod)):
        if isinstance(member.func, types.FunctionType):
            yield member.func, False
    elif isinstance(member, LruCached) and isinstance(member.__wrapped__, types.FunctionType):
        yield member.__wrapped__, False


def with_wrapped(function: types.FunctionType) -> list[types.FunctionType]:
    """Return a function, and the functions in its closure, which decorators wrapped."""
    found = [function]
    for outer in found:
        for value in variables_around(outer).values():
            if isinstance(value, dict) and not is_users_function(outer):
                inside: Iterable[Any] = list(value.values())  # as `singledispatch` has them
            else:
                inside = (value,)
            found += [
                each
                for each in inside
                if isinstance(each, types.FunctionType) and each not in found
            ]
    return found


def variables_around(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return found


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    values = function.__defaults__ or ()
    found = dict(zip(names[len(names) - len(values) :], values, strict=True))
    return {**found, **(function.__kwdefaults__ or {})}


@cached_by_class
def methods_of(cls: Any) -> list[tuple[str, Any]]:
    """Return a class's methods, except the ones that make, copy and end its instances."""
    unused = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__"}
    unused |= {"__setstate__", "__getstate__", "__reduce__", "__deepcopy__", "__copy__"}
    return [
        (name, member)
        for base in _bases_to_examine(cls)
        for name, member in vars(base).items()
        if name not in unused
    ]


@cached_by_class
def is_python_code(cls: Any) -> bool:
    """True if all methods of a class are Python code, whose byte code can be read."""
    if type(cls).__call__ is not type.__call__ or cls.__getattribute__ is not _USUALLY_FOUND:
        return False
    return all(
        is_heap_class(base)
        and "__getattr__" not in vars(base)
        and all(map(_is_pythons_member, vars(base).values()))
        for base in _bases_to_examine(cls)
    )


def _is_pythons_member(member: Any) -> bool:
    if isinstance(member, (types.FunctionType, property, staticmethod, classmethod)):
        return True
    is_usual = isinstance(member, types.GetSetDescriptorType)  # `__dict__`, `__weakref__`
    return is_usual or not hasattr(type(member), "__get__")


def _bases_to_examine(cls: Any) -> list[Any]:
    """Return the bases whose methods may change an object; torch's ``Dataset`` changes none."""
    torchs = "torch.nn.modules.module"
    return [base for base in cls.__mro__[:-1] if base.__module__ not in ("abc", torchs)]


def is_in_own_table(value: Any, name: str) -> bool:
    """True if an attribute is in the instance's ``__dict__``, and found by the usual lookup."""
    cls = type(value)
    return (
        type.__getattribute__(cls, "__getattribute__") is _USUALLY_FOUND
        and name in getattr(value, "__dict__", {})
        and not any(
            hasattr(type(vars(base)[name]), "__set__") for base in cls.__mro__ if name in vars(base)
        )
    )
