"""Copies all other objects: rebuilds them from the state that ``pickle`` asks their class for."""

from __future__ import annotations

import copyreg
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from stoker.replicas.copying.attributes import attributes_of, is_plainly_reduced
from stoker.replicas.copying.containers import copy_several
from stoker.replicas.copying.copier import Copier, Uncopyable, imported_types, same_objects
from stoker.replicas.copying.finalizers import restore, silence
from stoker.replicas.provenance import cached_by_class, is_users_class
from stoker.replicas.thread_safety import ATOMS

_NESTED = 50  # objects that are copied within each other, in 6 calls each; Python allows 1,000
_DEEP = 20  # levels of two states that are compared; what refers to itself never ends
_MISSING: Any = object()
_NEWOBJ: Any = getattr(copyreg, "__newobj__")  # noqa: B009  # type stubs do not have it


def copy_object(copier: Copier, x: Any, cls: type) -> Any:
    if hasattr(cls, "__deepcopy__"):
        again = _copy_by_deepcopy(copier, x)
        if again is not x:
            return again
    reduce = copyreg.dispatch_table.get(cls)
    is_plain = reduce is None and is_plainly_reduced(cls)
    made: Any = x.__reduce_ex__(4) if reduce is None else reduce(x)
    if isinstance(made, str):
        return _share_or_refuse(x, cls)
    parts: list[Any] = list(made)
    parts += [None] * (6 - len(parts))
    make, args, state, items, pairs, set_state = parts
    if make is _NEWOBJ and len(args) == 1:
        again = _maker(args[0])(args[0])
    elif make is _NEWOBJ:  # the class comes first
        again = args[0].__new__(args[0], *map(copier.copy, args[1:]))
    else:
        again = copier.copy(make)(*map(copier.copy, args))
    if again is x:
        return _share_or_refuse(x, cls)
    copier.memo[id(x)] = again
    failures = copier.failures
    silence(again)  # its ``__del__`` would delete the file, or free the handle, of the original
    if state is not None and state is getattr(x, "__dict__", None):
        is_plain |= set_state is None and not hasattr(type(again), "__setstate__")
    copier.where.append(cls.__qualname__)
    if is_plain and copier.nested < _NESTED:
        copier.nested += 1
        try:
            _copy_attributes(copier, x, again)
        finally:
            copier.nested -= 1
    elif is_plain:  # a long chain of objects: it waits, so that the stack stays short
        copier.later.append(partial(_copy_attributes, copier, x, again))
    elif state is not None:
        _set_state(copier, again, state, set_state)
    if not is_plain or args[1:] or make is not _NEWOBJ:
        known = (make, args) if is_plain else (make, args, state)
        copier.check(lambda: _alike(_reduce(x, reduce)[: len(known)], known))
    if items is not None:
        _add_items(copier, x, again, list(items))
    if pairs is not None:
        _add_pairs(copier, x, again, dict(pairs))
    copier.where.pop()
    if not is_plain and copier.failures == failures:
        restore(again)  # its class defines copies, so it expects ``__del__`` of each
    return again


def _set_state(copier: Copier, again: Any, state: Any, set_state: Any) -> None:
    if set_state is not None:
        set_state(again, copier.copy(state))
    elif hasattr(type(again), "__setstate__"):
        again.__setstate__(copier.copy(state))
    else:
        own, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if own:
            vars(again).update(copier.copy(own))
        for name, value in (slots or {}).items():
            setattr(again, name, copier.copy(value))


def _add_items(copier: Copier, x: Any, again: Any, held: list[Any]) -> None:
    """Fill the copy of a list, or of another object that pickles elements to append."""
    copier.check(lambda: same_objects(list.__iter__(x) if isinstance(x, list) else iter(x), held))
    extend = again.extend if hasattr(again, "extend") else None
    copies = copy_several(copier, held)
    if extend is not None:
        extend(copies)
    else:
        for each in copies:
            again.append(each)


def _add_pairs(copier: Copier, x: Any, again: Any, held: dict[Any, Any]) -> None:
    keys, values = list(held), list(held.values())
    copier.check(
        lambda: same_objects(dict.__iter__(x), keys) and same_objects(dict.values(x), values)
    )
    for key, value in held.items():
        again[copier.copy(key)] = copier.copy(value)


def _share_or_refuse(x: Any, cls: type) -> Any:
    """Share an object that is its own copy, unless it is the user's and has attributes."""
    if is_users_class(cls) and attributes_of(x):
        raise Uncopyable("its copy would be itself")
    return x


def _copy_attributes(copier: Copier, x: Any, again: Any) -> None:
    """Copy all attributes; one without a copy is as it was when the epoch began, if unset then."""
    held = attributes_of(x)
    names, values = list(held), list(held.values())

    def is_current() -> bool:
        now = attributes_of(x)
        return same_objects(now.values(), values) and list(now) == names

    copier.check(is_current)
    new: dict[str, Any] = {}
    is_whole = True
    for name, value in held.items():
        copier.where.append(f"{type(x).__qualname__}.{name}")
        new[name], is_kept = copier.copy_attribute(value, x, name)
        is_whole &= is_kept
        copier.where.pop()
    table = getattr(again, "__dict__", None)
    for name, value in new.items():
        if not is_whole and copier.unset.was_unset(x, name):
            if copier.unset.was_missing(x, name):
                continue
            value = None
        if table is not None and name in vars(x):
            table[name] = value
        else:
            object.__setattr__(again, name, value)


def _copy_by_deepcopy(copier: Copier, x: Any) -> Any:
    """Copy by ``__deepcopy__``, with a memo of the copies of its attributes."""
    held = attributes_of(x)
    for value in held.values():
        copier.try_to_copy(value)
    again = x.__deepcopy__(dict(copier.memo))
    if again is x:
        return x
    copier.memo[id(x)] = again
    for name, value in attributes_of(again).items():
        if value is held.get(name, _MISSING):
            object.__setattr__(again, name, copier.copy(value))
    names, values = list(held), list(held.values())
    if held:
        copier.check(
            lambda: (
                same_objects(attributes_of(x).values(), values) and list(attributes_of(x)) == names
            )
        )
    else:
        copier.check(lambda: False)
    return again


@cached_by_class
def _maker(cls: type) -> Callable[[type], Any]:
    """Return the ``__new__`` of the first base that no user wrote.

    A user's ``__new__`` may register the instance, or return another one.
    """
    bases: Any = cls.__mro__
    base = next(b for b in bases if "__new__" in vars(b) and not is_users_class(b))
    make: Callable[[type], Any] = base.__new__
    return make


def _reduce(x: Any, reduce: Callable[[Any], Any] | None) -> Any:
    made = x.__reduce_ex__(4) if reduce is None else reduce(x)
    return (*made, None)[:3]


def _alike(left: Any, right: Any, depth: int = 0) -> bool:
    """True if two reduced states are equal, value by value."""
    if left is right:
        return True
    if type(left) is not type(right) or depth > _DEEP:
        return False
    if type(left) in ATOMS:
        return bool(left == right)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(
            _alike(a, b, depth + 1) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, dict):
        return _alike(list(left), list(right), depth + 1) and _alike(
            list(left.values()), list(right.values()), depth + 1
        )
    if isinstance(left, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and not left.dtype.hasobject
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, imported_types("torch", "Tensor")):
        return bool(sys.modules["torch"].equal(left, right))
    if isinstance(left, (types.FunctionType, types.MethodType)):
        return bool(left == right)
    return _alike(_reduce(left, None), _reduce(right, None), depth + 1)
