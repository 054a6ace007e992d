"""Copies containers: a level of the structure at a time, all elements of one kind at once."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from itertools import chain, islice, repeat
from typing import Any

from stoker.replicas.copying.attributes import is_bare
from stoker.replicas.copying.copier import Copier, same_objects
from stoker.replicas.thread_safety import ATOMS, are_declared

_MANY = 64  # elements from which a container is copied level by level instead of one by one
_DEEP = 20  # levels of containers; what refers to itself never ends
_OBJECT: Any = object


class _AtomList:
    """The elements of a list that can all be shared; kept from one copy to the next."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held
        self._looked: tuple[object, bool] | None = None

    def is_current(self, x: list[Any], generation: object) -> bool:
        """True if the list has not changed. All copies of a generation share one look."""
        if generation is None or self._looked is None or self._looked[0] is not generation:
            self._looked = generation, same_objects(x, self.held)
        return self._looked[1]


_atom_lists: weakref.WeakValueDictionary[int, _AtomList] = weakref.WeakValueDictionary()


def copy_list(copier: Copier, x: list[Any]) -> list[Any]:
    known = _atom_lists.get(id(x))
    if known is not None and same_objects(x, known.held):
        copier.alive.append(known)
        copier.check(lambda: known.is_current(x, copier.generation))
        return x.copy()
    out: list[Any] = []
    copier.memo[id(x)] = out
    held = x.copy()
    copies = copy_several(copier, held)
    if copies is held and len(held) >= _MANY:
        _atom_lists[id(x)] = atoms = _AtomList(held)
        copier.alive.append(atoms)
        copier.check(lambda: atoms.is_current(x, copier.generation))
    else:
        copier.check(lambda: same_objects(x, held))
    out.extend(copies)
    return out


def copy_tuple(copier: Copier, x: tuple[Any, ...]) -> tuple[Any, ...]:
    held = list(x)
    copies = copy_several(copier, held)
    return x if copies is held or same_objects(copies, held) else tuple(copies)


def copy_dict(copier: Copier, x: dict[Any, Any]) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    copier.memo[id(x)] = out
    _fill(copier, out, x)
    return out


def _fill(copier: Copier, out: Any, x: dict[Any, Any]) -> None:
    keys, values = list(x), list(x.values())
    copier.check(lambda: same_objects(x, keys) and same_objects(x.values(), values))
    new_keys, new_values = copy_several(copier, keys), copy_several(copier, values)
    if new_keys is keys and new_values is values and type(out) is dict:
        out.update(x)
        return
    for key, value in zip(new_keys, new_values, strict=True):
        out[key] = value


def copy_ordered_dict(copier: Copier, x: OrderedDict[Any, Any]) -> OrderedDict[Any, Any]:
    out: OrderedDict[Any, Any] = OrderedDict()
    copier.memo[id(x)] = out
    _fill(copier, out, x)
    return out


def copy_defaultdict(copier: Copier, x: defaultdict[Any, Any]) -> defaultdict[Any, Any]:
    out: defaultdict[Any, Any] = defaultdict()
    copier.memo[id(x)] = out
    factory = x.default_factory
    copier.check(lambda: x.default_factory is factory)
    out.default_factory = copier.copy(factory)
    _fill(copier, out, x)
    return out


def copy_set(copier: Copier, x: set[Any]) -> set[Any]:
    out: set[Any] = set()
    copier.memo[id(x)] = out
    held = list(x)
    seen = {*map(id, held)}
    copier.check(lambda: {*map(id, x)} == seen and len(held) == len(x))
    out.update(copy_several(copier, held))
    return out


def copy_frozenset(copier: Copier, x: frozenset[Any]) -> frozenset[Any]:
    held = list(x)
    copies = copy_several(copier, held)
    return x if copies is held or same_objects(copies, held) else frozenset(copies)


def copy_deque(copier: Copier, x: deque[Any]) -> deque[Any]:
    out: deque[Any] = deque(maxlen=x.maxlen)
    copier.memo[id(x)] = out
    held = list(x)
    copier.check(lambda: same_objects(x, held))
    out.extend(copy_several(copier, held))
    return out


def copy_weak_values(copier: Copier, x: Any) -> Any:
    out: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
    held = dict(x)
    copier.check(
        lambda: same_objects(x, list(held)) and same_objects(x.values(), list(held.values()))
    )
    for key, value in held.items():
        again = copier.copy(value)
        copier.alive.append(again)
        out[copier.copy(key)] = again
    return out


def copy_weak_keys(copier: Copier, x: Any) -> Any:
    out: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    held = list(x.items())
    seen = list(chain.from_iterable(held))
    copier.check(lambda: same_objects(chain.from_iterable(x.items()), seen))
    for key, value in held:
        again = copier.copy(key)
        copier.alive.append(again)
        out[again] = copier.copy(value)
    return out


def copy_mapping_proxy(copier: Copier, x: Any) -> Any:
    (table,) = gc.get_referents(x)
    return types.MappingProxyType(copier.copy(table))


def copy_several(copier: Copier, items: list[Any], depth: int = 0) -> list[Any]:
    """Return copies of many objects; the same list if all of them can be shared.

    Large structures are copied a level at a time, all of a kind at once.
    """
    kinds = set(map(type, items))
    if kinds <= ATOMS:
        return items
    if len(items) < _MANY or depth == _DEEP:
        return list(map(copier.copy, items))
    if len(kinds) > 1:
        return _copy_mixed(copier, items, kinds, depth)
    (kind,) = kinds
    if kind is tuple:
        inner = list(chain.from_iterable(items))
        copies = copy_several(copier, inner, depth + 1)
        if copies is inner or same_objects(copies, inner):
            return items
        parts = iter(copies)
        return [tuple(islice(parts, size)) for size in map(len, items)]
    bare = is_bare(kind)
    if kind is not list and kind is not dict and not bare:
        return list(map(copier.copy, items))
    keys = {*map(id, items)}
    if len(keys) < len(items) or (bare and are_declared(kind, keys)) or copier.has_met_any(keys):
        return list(map(copier.copy, items))
    copier.claim_all(keys, items)
    out: list[Any]
    if bare:
        return _copy_bare_objects(copier, items, kind, depth)
    sizes = list(map(len, items))
    copier.check(lambda: list(map(len, items)) == sizes)
    if kind is list:
        inner = list(chain.from_iterable(items))
        copier.check(lambda: same_objects(chain.from_iterable(items), inner))
        if ATOMS.issuperset(map(type, inner)):
            out = list(map(list, items))
            copier.memo.update(zip(map(id, items), out, strict=True))
            return out
        out = [[] for _ in items]
        copier.memo.update(zip(map(id, items), out, strict=True))
        parts = iter(copy_several(copier, inner, depth + 1))
        for new, size in zip(out, sizes, strict=True):
            new.extend(islice(parts, size))
        return out
    names = list(chain.from_iterable(items))
    inner = list(chain.from_iterable(map(dict.values, items)))
    copier.check(
        lambda: (
            same_objects(chain.from_iterable(items), names)
            and same_objects(chain.from_iterable(map(dict.values, items)), inner)
        )
    )
    if not ATOMS.issuperset(map(type, names)):
        new_names = copy_several(copier, names, depth + 1)
    else:
        new_names = names
        if ATOMS.issuperset(map(type, inner)):
            out = list(map(dict.copy, items))
            copier.memo.update(zip(map(id, items), out, strict=True))
            return out
    out = [{} for _ in items]
    copier.memo.update(zip(map(id, items), out, strict=True))
    pairs = zip(new_names, copy_several(copier, inner, depth + 1), strict=True)
    for new, size in zip(out, sizes, strict=True):
        new.update(islice(pairs, size))
    return out


def _copy_bare_objects(copier: Copier, items: list[Any], cls: type, depth: int) -> list[Any]:
    """Return copies of many objects of one class that consist of a ``__dict__`` each."""
    tables = list(map(vars, items))
    for names in set(map(tuple, tables)):
        copier.look_at_class(cls, own=frozenset(names))
    copier.check(lambda: same_objects(map(vars, items), tables))
    out: list[Any] = list(map(_OBJECT.__new__, repeat(cls, len(items))))
    copier.memo.update(zip(map(id, items), out, strict=True))
    copier.where.append(cls.__qualname__)
    copies = copy_several(copier, tables, depth + 1)
    deque(map(_OBJECT.__setattr__, out, repeat("__dict__"), copies), maxlen=0)
    copier.where.pop()
    return out


def _copy_mixed(copier: Copier, items: list[Any], kinds: set[type], depth: int) -> list[Any]:
    out = items.copy()
    for kind in kinds - ATOMS:
        places = [at for at, each in enumerate(map(type, items)) if each is kind]
        copies = copy_several(copier, [items[at] for at in places], depth)
        for at, new in zip(places, copies, strict=True):
            out[at] = new
    return out
