"""Tells the user's own code from that of installed packages and of the standard library."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def cached_by_class(ask: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """Cache a function of a class, for as long as the class lives.

    Not longer: a class holds the globals of its methods, and with them all objects of a notebook.
    """
    known: weakref.WeakKeyDictionary[Any, Answer] = weakref.WeakKeyDictionary()

    @functools.wraps(ask)
    def answer(cls: Any) -> Answer:
        found = known.get(cls, _NOT_ASKED)
        if found is _NOT_ASKED:
            found = known[cls] = ask(cls)
        known_answer: Answer = found
        return known_answer

    return answer


_NOT_ASKED: Any = object()


@functools.lru_cache(4096)
def is_users_file(path: str) -> bool:
    """True if a file of code belongs neither to an installed package nor to Python.

    Code that is typed in (``<stdin>``, a notebook's cell) is the user's.
    """
    if path.startswith("<frozen ") or any(part in path for part in _INSTALLED):
        return False
    path = os.path.abspath(path)
    return not path.startswith((_STANDARD, _PACKAGE)) and not _is_installed_by_target(path)


def _is_installed_by_target(path: str) -> bool:
    """True if ``pip install --target``, or a bundle for a cluster, put a file beside its record."""
    for folder in map(os.path.abspath, sys.path):
        if path.startswith(folder + os.sep):
            top = os.path.relpath(path, folder).partition(os.sep)[0]
            if top in _installed_names(folder):
                return True
    return False


@functools.lru_cache(256)
def _installed_names(folder: str) -> frozenset[str]:
    """Return the packages and modules of a folder that the records of installers list."""
    names = set()
    for record in glob.iglob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with contextlib.suppress(OSError), open(record, encoding="utf-8", errors="replace") as file:
            names |= {line.partition(",")[0].partition("/")[0] for line in file}
    return frozenset(names)


def is_users_module(name: str | None) -> bool:
    """True if a module, by its name, is the user's own."""
    if name is None:
        return False
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None:
        return name not in sys.builtin_module_names
    path = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    if path is None:  # `__main__` of a notebook; a package made of folders alone
        return name == "__main__" or bool(getattr(module, "__path__", None))
    return path not in ("built-in", "frozen") and is_users_file(path)


_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: classes of a ``class`` statement have it, static types in C do not."""


def is_heap_class(cls: type) -> bool:
    """True if a class was made at run time, as by a ``class`` statement."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def is_users_class(cls: type) -> bool:
    """True if the user wrote a class."""
    return is_heap_class(cls) and is_users_module(cls.__module__)


def is_users_function(function: types.FunctionType) -> bool:
    """True if the user wrote a function, by its code's file: a decorator may change its module."""
    return is_users_file(function.__code__.co_filename)
