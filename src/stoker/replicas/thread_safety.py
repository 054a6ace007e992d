"""Decides which objects threads may share: by type, by a table of classes, or as users declare."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import functools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Set
from typing import Any, TypeVar

import numpy as np

from stoker.replicas.provenance import cached_by_class, is_users_class

Anything = TypeVar("Anything")

LruCached = type(functools.lru_cache(int))

ATOMS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, slice, type(...),
        type(NotImplemented), object, types.ModuleType, types.CodeType, threading.local,
        types.GenericAlias, types.UnionType, types.WrapperDescriptorType,
        types.MethodDescriptorType, np.ufunc, *np.sctypeDict.values(),
    }
) - {np.object_, np.void}  # fmt: skip
"""Types of shared instances: they cannot change, or hold separate data for each thread."""

_SHARED_CLASSES: dict[str, tuple[str, ...] | None] = {
    "re": ("Pattern", "Match"),
    "datetime": None,
    "zoneinfo": None,
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "uuid": ("UUID",),
    "pathlib": None,
    "pathlib._local": None,  # from Python 3.13 on
    "_struct": ("Struct",),
    "dataclasses": None,
    "ipaddress": None,
    "concurrent.futures.thread": ("ThreadPoolExecutor",),
    "concurrent.futures.process": ("ProcessPoolExecutor",),
    # Meant to be shared by workers.
    "multiprocessing.synchronize": None,
    "multiprocessing.sharedctypes": None,
    "multiprocessing.queues": None,
    "multiprocessing.managers": None,
    "multiprocessing.shared_memory": None,
    "torch": ("dtype", "device", "layout", "memory_format", "Size"),
    "datasets.table": None,
    # An optimizer belongs to the training loop; a function may reach it, but does not call it.
    "torch.optim.optimizer": ("Optimizer",),
    # Clients and environments that are documented as thread-safe, and cannot be copied.
    "botocore.client": ("BaseClient",),
    "sqlalchemy.engine.base": ("Engine",),
    "pymongo.mongo_client": ("MongoClient",),
    "pymongo.synchronous.mongo_client": ("MongoClient",),
    "builtins": ("Environment",),  # LMDB's
    # A progress bar draws under its own lock, and no example depends on its count.
    "tqdm.std": ("tqdm",),
}
"""By module: classes whose instances are shared, None for all of them."""

_ARROW = (
    "Table", "RecordBatch", "Schema", "Field", "DataType", "Array", "ChunkedArray", "Scalar",
    "Buffer", "Dataset", "Fragment", "Expression", "KeyValueMetadata",
)  # fmt: skip

ONE_FOR_ALL = (enum.Enum, logging.Logger, logging.Handler, contextvars.ContextVar)
"""Types whose instances cannot be replaced by a second one."""

_declared: dict[int, Any] = {}
"""By ``id``: a weak reference to the object, or the object itself if it takes none."""


def thread_safe(obj: Anything) -> Anything:
    """Declare that several threads may call an object at once: they share it, without a lock.

    By default each worker thread calls its own copy of the dataset and of the functions; an object
    that cannot be copied is called by one thread at a time. A declared object, and all that it
    refers to, is shared by all threads as it is.

    Args:
        obj: a function, an instance (of a dataset, a tokenizer, a connection), or a class, whose
            instances are then all shared. Classes derived from it are not declared by that.

    Returns:
        ``obj`` itself, so this can also be used as a decorator.
    """
    try:
        key = id(obj)
        _declared[key] = weakref.ref(obj, lambda _: _declared.pop(key, None))
    except TypeError:
        _declared[id(obj)] = obj
    return obj


def is_declared(obj: Any) -> bool:
    """True if an object, its class, or the function behind a method or partial is declared."""
    return _holds(obj) or _holds(type(obj))


def are_declared(cls: type, keys: Set[int]) -> bool:
    """True if a class is declared, or any of its objects with these ``id``."""
    return _holds(cls) or not _declared.keys().isdisjoint(keys)


def _holds(obj: Any) -> bool:
    known = _declared.get(id(obj))
    return known is not None and (
        known is obj or (isinstance(known, weakref.ref) and known() is obj)
    )


def is_shared(x: Any) -> bool:
    """True if all threads use this object as it is, by its type or by declaration."""
    cls: Any = type(x)
    if cls in ATOMS or isinstance(x, (type, np.dtype, threading.local)):
        return True
    if isinstance(x, ONE_FOR_ALL):
        return _holds_nothing(x) or is_declared(x)
    if _is_shared_class(cls) or is_declared(x):
        return True
    if cls is types.BuiltinFunctionType or cls is types.MethodWrapperType:
        return is_shared(x.__self__) or is_global_generator(x.__self__)
    return _is_constant(x)


def _is_constant(x: Any) -> bool:
    """True if this is a frozen dataclass of numbers, texts, and tuples of these."""
    parameters = getattr(type(x), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return False
    values = [getattr(x, each.name, None) for each in dataclasses.fields(x)]
    own = getattr(x, "__dict__", {})  # a cached property would stand there
    return len(own) <= len(values) and all(map(_is_fixed, values))


def _is_fixed(x: Any) -> bool:
    if type(x) is tuple:
        return all(map(_is_fixed, x))
    return type(x) in ATOMS or _is_constant(x)


def _holds_nothing(x: Any) -> bool:
    """True if a process-wide object, such as a logger, holds no changing state of the user's."""
    if isinstance(x, contextvars.ContextVar):  # a thread begins with the default
        try:
            return is_shared(contextvars.Context().run(x.get))
        except LookupError:
            return True
    if isinstance(x, logging.Handler):
        return not is_users_class(type(x))  # what reaches it reads what it has kept
    if isinstance(x, logging.Logger):
        inherits = x.propagate and x.parent is not None
        return all(map(_is_called_alone, x.handlers)) and not (
            inherits and not _holds_nothing(x.parent)
        )
    return all(type(each) in ATOMS or is_shared(each) for each in vars(x).values())


def _is_called_alone(handler: Any) -> bool:
    """True if a logger's handler may be called from any thread."""
    if _holds_nothing(handler):
        return True
    has_lock = isinstance(handler, logging.Handler) and handler.lock is not None
    return has_lock and not handler.filters and _is_locked_by_logging(type(handler))


@cached_by_class
def _is_locked_by_logging(cls: Any) -> bool:
    """True if a handler works under its lock alone: the user wrote nothing but ``emit``."""
    outside = ("handle", "filter", "acquire", "release", "createLock")
    return all(
        vars(base).keys().isdisjoint(outside) for base in cls.__mro__ if is_users_class(base)
    )


@cached_by_class
def _is_shared_class(cls: Any) -> bool:
    if cls.__module__.startswith("pyarrow"):
        return any(each.__name__ in _ARROW for each in cls.__mro__)
    for base in cls.__mro__[:-1]:
        names = _SHARED_CLASSES.get(base.__module__, ())
        if names is None or base.__name__ in names:
            return True
    return False


def is_global_generator(x: Any) -> bool:
    own = getattr(sys.modules.get("random"), "_inst", None)
    legacy = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)
    return x is not None and (x is own or x is legacy)
