"""Copies users' functions, with their closures, defaults, and the globals that they name."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

from stoker.replicas.code_facts import facts_of
from stoker.replicas.copying.attributes import is_filled
from stoker.replicas.copying.copier import Copier
from stoker.replicas.provenance import is_users_function, is_users_module
from stoker.replicas.thread_safety import ATOMS, is_shared

_MISSING: Any = object()
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


def copy_function(copier: Copier, f: types.FunctionType) -> Any:
    if not is_users_function(f):
        # A decorator's: what it closes over may be the user's.
        if f.__closure__ is None or _is_importable(f):
            return f
    else:
        copier.look_at_function(f)
    if not _needs_copy(f, set()):
        _watch(copier, f)
        return f
    cells = tuple(_copy_cell(copier, cell) for cell in f.__closure__ or ())
    users = is_users_function(f)
    space = _copy_globals(copier, f) if users else f.__globals__
    g = types.FunctionType(f.__code__, space, f.__name__, None, cells or None)
    copier.memo[id(f)] = g
    functools.update_wrapper(g, f, functools.WRAPPER_ASSIGNMENTS, ())
    del vars(g)["__wrapped__"]
    g.__defaults__ = copier.copy(f.__defaults__)
    g.__kwdefaults__ = copier.copy(f.__kwdefaults__)
    vars(g).update(copier.copy(dict(vars(f))))
    _watch(copier, f)
    for mine, theirs in zip(cells, f.__closure__ or (), strict=True):
        if is_filled(theirs) and not is_filled(mine):
            mine.cell_contents = copier.copy(theirs.cell_contents)
    if users:
        copier.where.append(f.__qualname__)
        stored = _find_stored_globals(f.__globals__)
        for name in sorted(facts_of(f.__code__).names):
            if name in f.__globals__:
                copier.where.append(f"the global {name!r} of {f.__qualname__}")
                space[name], is_kept = copier.copy_attribute(f.__globals__[name], f, name)
                if not is_kept and copier.unset.was_missing(f, name):
                    del space[name]
                copier.where.pop()
            if name in stored:
                copier.claim((id(f.__globals__), name))
        copier.where.pop()
    return g


def _copy_cell(copier: Copier, cell: types.CellType) -> types.CellType:
    """Return the copy of a closure's variable; all functions that close over it share the copy."""
    copier.claim(id(cell), cell)
    new: types.CellType = copier.memo.setdefault(id(cell), types.CellType())
    return new


def _copy_globals(copier: Copier, f: types.FunctionType) -> dict[str, Any]:
    """Return the copied globals, which all copies of a module's functions share."""
    known = copier.module_globals.get(id(f.__globals__))
    if known is None:
        known = copier.module_globals[id(f.__globals__)] = (dict(f.__globals__), f.__globals__)
    return known[0]


def _watch(copier: Copier, f: types.FunctionType) -> None:
    code, defaults, table = f.__code__, f.__defaults__, dict(vars(f))
    held = [(cell, cell.cell_contents) for cell in f.__closure__ or () if is_filled(cell)]
    names = sorted(facts_of(code).names) if is_users_function(f) else []
    values = [f.__globals__.get(name, _MISSING) for name in names]
    copier.check(
        lambda: (
            f.__code__ is code
            and f.__defaults__ is defaults
            and vars(f) == table
            and all(is_filled(cell) and cell.cell_contents is value for cell, value in held)
            and all(
                f.__globals__.get(name, _MISSING) is value
                for name, value in zip(names, values, strict=True)
            )
        )
    )


def _needs_copy(f: types.FunctionType, visited: set[int]) -> bool:
    """True if a function, or one that it names, holds anything to copy."""
    if id(f) in visited:
        return False
    visited.add(id(f))
    if any(name != "__wrapped__" for name in vars(f)):
        return True
    facts = facts_of(f.__code__)
    users = is_users_function(f)
    if users and facts.stores:
        return True
    if users and f.__closure__:
        return True  # other functions may set what it closes over
    parts = [cell.cell_contents for cell in f.__closure__ or () if is_filled(cell)]
    parts += f.__defaults__ or ()
    parts += (f.__kwdefaults__ or {}).values()
    parts += vars(f).values()
    if users:
        stored = _find_stored_globals(f.__globals__)
        if not stored.isdisjoint(facts.names):
            return True
        parts += [f.__globals__[name] for name in facts.names if name in f.__globals__]
    for part in parts:
        if type(part) in ATOMS or isinstance(part, type) or is_shared(part):
            continue
        if not isinstance(part, types.FunctionType):
            return True
        is_own = is_users_function(part) or (part.__closure__ and not _is_importable(part))
        if is_own and _needs_copy(part, visited):
            return True
    return False


def copy_method(copier: Copier, x: types.MethodType) -> types.MethodType:
    return types.MethodType(copier.copy(x.__func__), copier.copy(x.__self__))


def copy_lru_cached(copier: Copier, x: Any) -> Any:
    inner = x.__wrapped__
    if isinstance(inner, types.FunctionType) and not is_users_function(inner):
        return x
    again = functools.lru_cache(**x.cache_parameters())(copier.copy(inner))
    functools.update_wrapper(again, x)
    again.__wrapped__ = copier.copy(inner)
    return again


def copy_partial(copier: Copier, x: functools.partial[Any]) -> Any:
    func, args, keywords = x.func, x.args, x.keywords
    held = dict(keywords)
    copier.check(lambda: x.func is func and x.args is args and dict(x.keywords) == held)
    again = functools.partial(copier.copy(func), *map(copier.copy, args))
    again.keywords.update({name: copier.copy(value) for name, value in held.items()})
    vars(again).update(copier.copy(dict(vars(x))))
    return again


def _is_importable(f: types.FunctionType) -> bool:
    """True if a package defines this function by name, rather than building it from a user's."""
    if is_users_module(f.__module__):
        return False
    found: Any = sys.modules.get(f.__module__)
    for name in f.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is f


def _find_stored_globals(space: dict[str, Any]) -> frozenset[str]:
    """Return the names of the globals that the functions of a module set."""
    return frozenset(
        name
        for value in list(space.values())
        if isinstance(value, types.FunctionType) and value.__globals__ is space
        for name in _names_stored_by(value.__code__)
    )


@functools.lru_cache(4096)
def _names_stored_by(code: types.CodeType) -> frozenset[str]:
    within = (_names_stored_by(each) for each in code.co_consts if isinstance(each, types.CodeType))
    # Every second byte is an operation: the look is made only at code that sets any global.
    own = facts_of(code).stores if _STORE_GLOBAL in code.co_code[::2] else frozenset[str]()
    return own.union(*within)
