"""Tells whether a process that was forked, or started, would be the same if it were made now.

A forked process has all that its parent had then: the user's objects, the globals, class attributes
and modules that their code names, and the settings of packages. ``ForkSnapshot`` goes the way of a
thread's copies (``copier``), which compare each original; but threads share what lies in classes,
modules and large arrays, and see its changes. So what the names in the code lead to is looked at
here as well. Where code may look anywhere, or an object has no copy, nothing can be told.

A process that was started by another method has what was pickled for it: ``PickleSnapshot``.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import gc
import os
import pickle
import sys
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import xxhash

from stoker.replicas.code_facts import CodeFacts, facts_of
from stoker.replicas.copying.attributes import attributes_of, is_plainly_reduced
from stoker.replicas.copying.copier import Copier, imported_types
from stoker.replicas.copying.kinds import make_copy
from stoker.replicas.copying.memory_blocks import LargerBlock
from stoker.replicas.definitions import functions_of
from stoker.replicas.findings import MISSING
from stoker.replicas.provenance import (
    is_heap_class,
    is_users_class,
    is_users_function,
    is_users_module,
)
from stoker.replicas.thread_safety import ATOMS, LruCached

_LARGE_BYTES = 128 << 20
"""Of large arrays, in all, that are compared: 13 ms, a fork costs 20. Larger ones are not."""
_ANYWHERE = frozenset({"globals", "eval", "exec", "compile", "__import__"})
"""Built-in functions by which code reaches what it does not name."""
_BY_NAME = frozenset({"import_module", "__globals__", "_getframe", "f_globals", "modules"})
"""The same, as attributes."""
_TOO_MANY = 64
"""Modules of a package from which on only those that are named are looked at, not all: NumPy has 86
and torch 770, whose settings are in C. ``_settings`` has those."""
_LOOKED_THROUGH = (
    staticmethod, classmethod, property, functools.cached_property, functools.partialmethod,
)  # fmt: skip
_CONTAINERS = frozenset({list, dict, tuple, set, frozenset})
_PLAIN_DESCRIPTORS = (
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.BuiltinFunctionType,
)  # fmt: skip


class ForkSnapshot:
    """What some objects are, and what else their code can see. Taken right before the fork.

    No object in a root makes it raise. Nobody may call the objects meanwhile.

    Attributes:
        unknown: why it cannot be told whether they change; "" if it can.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        extents: list[tuple[int, int]] = []
        while True:
            try:
                self._look(roots, extents)
            except LargerBlock as larger:
                extents.append(larger.args)
            except Exception as error:  # of a module that is loaded when it is asked for, perhaps
                self.unknown = f"{type(error).__name__}: {error}"
                break
            else:
                break

    def _look(self, roots: Sequence[Any], extents: list[tuple[int, int]]) -> None:
        self._copier = copier = Copier(make_copy, None, extents)
        self._modules: dict[str, types.ModuleType] = {}
        self._absent: set[str] = set()
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        self._kinds: set[type] = set()  # of packages: programs change their classes, too
        self._seen: set[int] = set()
        self._locals: set[int] = set()
        self._why = ""
        collects = gc.isenabled()
        gc.disable()  # it would look through all that is copied, again and again
        try:
            for root in roots:
                copier.root(root)
            functions = names = objects = 0
            while (functions, names, objects) != (
                len(copier.examined),
                len(copier.names),
                len(copier.alive),
            ):
                for function in copier.examined[functions:]:
                    functions += 1
                    copier.root(function)
                    self._look_at_code(function, facts_of(function.__code__))
                for _, name, value in copier.names[names:]:
                    names += 1
                    self._look_at_name(name, value)
                for each in copier.alive[objects:]:
                    objects += 1
                    self._look_at_object(each)
        finally:
            if collects:
                gc.enable()
        if copier.declared:
            self._cannot_tell(f"{copier.declared[0]} is declared with stoker.thread_safe")
        if not copier.memory.watch_shared(_LARGE_BYTES):
            self._cannot_tell("its arrays are too large to be compared")
        copier.release_copies()
        whys = [why for why in (*copier.reasons(), self._why) if why]
        self.unknown = whys[0] if whys else ""
        self._caches = [
            (each, each.cache_info()) for each in copier.alive if isinstance(each, LruCached)
        ]
        self._classes = [(cls, list(vars(cls))) for cls in copier.classes]
        self._tables: list[tuple[Mapping[str, Any], list[str], list[Any]]] = [
            (table, list(table), list(table.values()))
            for table in map(vars, [*self._modules_to_watch(), *self._kinds])
        ]
        self._settings = _settings()

    def is_current(self) -> bool:
        """True if a process that is forked now would see the same; False if that is unknown."""
        try:
            return (
                not self.unknown
                and _settings() == self._settings
                and self._absent.isdisjoint(sys.modules)
                and all(each.cache_info() == info for each, info in self._caches)
                and all(list(vars(cls)) == names for cls, names in self._classes)
                and all(_are_same(attributes_of(x), held) for x, held in self._objects)
                and all(
                    list(table) == names and all(map(is_, table.values(), values))
                    for table, names, values in self._tables
                )
                and self._copier.is_current()
            )
        except Exception:  # whatever the user's own methods raise
            return False

    def _look_at_code(self, function: types.FunctionType, facts: CodeFacts) -> None:
        """Look for code that may reach what it does not name."""
        who = function.__qualname__
        anywhere = (facts.names & _ANYWHERE) | (facts.mentioned & _BY_NAME)
        if anywhere:
            self._cannot_tell(
                f"{who} uses {min(anywhere)}, which reaches what its code does not name"
            )
        for use in facts.uses:
            root, name, steps = use.path
            if root == "module" and name not in sys.modules:
                self._absent.add(name)
                continue
            if root == "global":
                value = function.__globals__.get(name, MISSING)
            elif root == "module":
                value = sys.modules[name]
            else:
                continue
            if isinstance(value, types.ModuleType):
                self._look_at_module(value)
                for step in steps:
                    inner = getattr(value, step, MISSING)
                    if not isinstance(inner, types.ModuleType):
                        break
                    value, steps = inner, steps[1:]
                    self._look_at_module(value)
                if not steps and is_users_module(value.__name__):
                    self._cannot_tell(f"{who} hands on the module {value.__name__}")

    def _look_at_name(self, name: str, value: Any) -> None:
        """Look at a value that code reaches by a name."""
        if value is MISSING or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, types.ModuleType):
            self._look_at_module(value)
        elif isinstance(value, type):
            if is_users_class(value):
                self._copier.root(value)
            self._look_at_kind(value)
        elif isinstance(value, types.FunctionType):
            if is_users_function(value) or value.__closure__:
                self._copier.root(value)
            else:
                self._look_at_package(value.__module__)
        elif isinstance(value, _LOOKED_THROUGH):
            for function, _ in functions_of(value, name):
                self._copier.root(function)
        elif isinstance(value, LruCached):
            self._copier.root(value)
        elif isinstance(value, _PLAIN_DESCRIPTORS) or name.startswith("__") or name == "_abc_impl":
            pass
        elif hasattr(type(value), "__get__") and not is_users_class(type(value)):
            if type(value).__name__ != "_tuplegetter":
                self._cannot_tell(f"{name} is a {type(value).__qualname__}")
        else:
            self._look_at_local(value)
            self._copier.root(value)

    def _look_at_kind(self, cls: type) -> None:
        """Look at a class and its bases, those of packages."""
        for base in cls.__mro__:
            if is_heap_class(base) and not is_users_class(base):
                self._look_at_package(base.__module__)
                if not base.__module__.startswith("stoker."):
                    self._kinds.add(base)

    def _look_at_local(self, value: Any) -> None:
        """Look at what belongs to a thread: a forked process begins with what this one has."""
        if isinstance(value, contextvars.ContextVar):
            self._cannot_tell(f"the context variable {value.name} may have another value")
        elif isinstance(value, threading.local) and id(value) not in self._locals:
            self._locals.add(id(value))
            held = attributes_of(value)
            self._objects.append((value, held))
            for each in held.values():
                self._copier.root(each)

    def _look_at_module(self, module: types.ModuleType) -> None:
        if not is_users_module(module.__name__):
            self._look_at_package(module.__name__)

    def _look_at_package(self, name: str | None) -> None:
        module = sys.modules.get(name or "")
        if module is not None and name is not None and name.partition(".")[0] != "stoker":
            self._modules[name] = module

    def _modules_to_watch(self) -> Iterable[types.ModuleType]:
        """Return the modules of packages that are named, each with the others of its package."""
        found = {name: each for name, each in self._modules.items() if name != "builtins"}
        packages: dict[str, list[str]] = {}
        for name in list(sys.modules):
            packages.setdefault(name.partition(".")[0], []).append(name)
        for top in {name.partition(".")[0] for name in found}:
            together = packages.get(top, [])
            if len(together) < _TOO_MANY:
                found.update((name, sys.modules[name]) for name in together)
        return [each for each in found.values() if hasattr(each, "__dict__")]

    def _look_at_object(self, x: Any) -> None:
        """Look for what threads share, or get anew: the copier does not compare it."""
        cls = type(x)
        if isinstance(x, np.ndarray):
            owner: Any = x
            while isinstance(owner, np.ndarray) and owner.base is not None:
                owner = owner.base
            owner = owner.obj if isinstance(owner, memoryview) else owner
            if type(owner).__module__ in ("ctypes", "_ctypes"):
                self._cannot_tell("an array lies in memory of ctypes")
        elif isinstance(x, imported_types("torch.nn", "Parameter")):
            self._cannot_tell("a torch parameter changes as it is trained")
        elif cls not in _CONTAINERS:
            self._look_at_kind(cls)
        is_data = isinstance(x, (np.ndarray, *imported_types("torch", "Tensor"), *_tables()))
        if is_data or not is_heap_class(cls):
            return  # the copier compares what is in it
        held = attributes_of(x)
        for value in held.values():
            self._look_at_local(value)
        if not is_plainly_reduced(cls) or hasattr(cls, "__deepcopy__"):
            self._objects.append((x, held))  # its class may leave some out of copies
            for value in held.values():
                self._copier.root(value)

    def _cannot_tell(self, why: str) -> None:
        self._why = self._why or why


@dataclasses.dataclass(frozen=True)
class PickleSnapshot:
    """What is sent to processes that import the program.

    Attributes:
        roots: the objects.
        unknown: why it cannot be told whether that changes; "" if it can.
        digest, settings: what they were.
    """

    roots: Any
    unknown: str
    digest: bytes = b""
    settings: tuple[Any, ...] = ()

    @classmethod
    def of(cls, roots: Any) -> PickleSnapshot:
        """Return the snapshot of objects that can be pickled, or what says why they cannot be."""
        try:
            return cls(roots, "", _digest_of(roots), _settings())
        except Exception as error:  # of the user's own classes, or of what is only inherited
            return cls(roots, f"{type(error).__name__}: {error}")

    def is_current(self) -> bool:
        """True if the same would be pickled now; False if that is unknown."""
        try:
            return (
                not self.unknown
                and _settings() == self.settings
                and _digest_of(self.roots) == self.digest
            )
        except Exception:
            return False


def _are_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """True if attributes are the same objects, or numbers and texts that are made when read."""
    return list(left) == list(right) and all(
        a is b or (type(a) in ATOMS and type(a) is type(b) and a == b)
        for a, b in zip(left.values(), right.values(), strict=True)
    )


def _tables() -> tuple[Any, ...]:
    return imported_types("pandas", "DataFrame", "Series", "Index")


class _Hash:
    """A file that keeps a digest of what is written to it."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return memoryview(data).nbytes

    def digest(self) -> bytes:
        return self._hash.digest()


def _digest_of(x: Any) -> bytes:
    found = _Hash()
    pickle.Pickler(found, pickle.HIGHEST_PROTOCOL).dump(x)
    return found.digest()


def _settings() -> tuple[Any, ...]:
    """Return what a process takes over beside Python's objects."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        folder = ""
    dtype = getattr(sys.modules.get("torch"), "get_default_dtype", None)
    return folder, dict(os.environ), list(sys.path), np.geterr(), dtype and dtype()
