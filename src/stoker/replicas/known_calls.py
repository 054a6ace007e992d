"""What functions and methods that are known by name do with what they are given."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from stoker.replicas.code_facts import Path
from stoker.replicas.provenance import is_users_function
from stoker.replicas.thread_safety import is_global_generator

_MISSING: Any = object()

PROCESS_WIDE = {
    "random": ("seed", "setstate"),
    "numpy.random": ("seed", "set_state"),
    "torch": ("manual_seed", "seed", "set_rng_state", "set_default_dtype"),
    "torch.random": ("manual_seed", "seed", "set_rng_state", "fork_rng"),
    "os": ("chdir", "fchdir", "umask"),
    "contextlib": ("chdir", "redirect_stdout", "redirect_stderr"),
    "locale": ("setlocale",),
    "lightning.pytorch": ("seed_everything",),
    "lightning.fabric.utilities.seed": ("seed_everything",),
    "pytorch_lightning": ("seed_everything",),
    "transformers": ("set_seed", "enable_full_determinism"),
    "transformers.trainer_utils": ("set_seed", "enable_full_determinism"),
    "accelerate.utils": ("set_seed",),
}
"""Functions that set what all threads of a process use."""
LOOKS = frozenset(
    {
        "get", "keys", "values", "items", "copy", "index", "count", "union", "intersection",
        "difference", "issubset", "issuperset", "isdisjoint", "astype", "tolist", "item", "min",
        "max", "sum", "mean", "std", "any", "all", "argmax", "argmin", "dot",
    }
)  # fmt: skip
"""Methods of containers that change nothing."""
_HARMLESS: frozenset[Any] = frozenset(
    {
        len, sum, min, max, sorted, enumerate, zip, range, list, tuple, dict, set, frozenset, any,
        all, isinstance, str, repr, print, type, id, map, filter, reversed, iter, np.array,
        np.asarray, np.stack, np.mean, np.sum, np.searchsorted, bytes,
    }
)  # fmt: skip
"""Functions that change nothing of what they are given."""
_READERS = frozenset(
    {
        "choice", "choices", "sample", "permutation", "join", "extend", "update", "union",
        "intersection", "difference", "isdisjoint", "issubset", "issuperset", "writelines",
    }
)  # fmt: skip
"""Methods, of whatever object, that change nothing of the containers that they are given."""
_WRITERS = frozenset(
    {
        "shuffle", "heapify", "heappush", "heappop", "heappushpop", "heapreplace", "insort",
        "insort_left", "insort_right", "setattr", "getattr", "setitem", "delitem", "cast", "copyto",
        "put", "place", "exec", "eval", "next",
    }
)  # fmt: skip
"""Functions of packages and of Python that change what they are given, or hand it on."""
WRITES_ATTRIBUTES = frozenset(
    {"__setattr__", "__delattr__", "setattr", "delattr", "__dict__", "vars", "exec", "eval"}
)
"""Names in the code of a method that may set attributes in ways that are not followed."""
PASSED_TO = frozenset(
    Path("global", name) for name in ("super", "isinstance", "type", "len", "repr", "str", "id")
)
"""What a method hands its object to, and which changes nothing of it."""


def is_harmless(path: Path | None, function: types.FunctionType) -> bool:
    value = _named(path, function)
    try:
        return value in _HARMLESS
    except TypeError:
        return False


def is_packages_reader(path: Path | None, function: types.FunctionType) -> bool:
    """Return whether a path leads to a function of a package or of Python that only reads.

    Nearly all of them do, so those that write are listed.
    """
    value = _named(path, function)
    if isinstance(value, types.MethodType) and is_global_generator(value.__self__):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        reads = not is_users_function(value)
    else:
        reads = isinstance(value, types.BuiltinFunctionType)
    return reads and value.__name__ not in _WRITERS


def is_numpys(path: Path, function: types.FunctionType) -> bool:
    value = function.__globals__.get(path.name) if path.root == "global" else None
    module = value.__name__ if isinstance(value, types.ModuleType) else None
    return (module or getattr(value, "__module__", None) or "").startswith("numpy")


def is_reading_method(path: Path | None, function: types.FunctionType) -> bool:
    """Return whether a path leads to a method that only reads, by its name (``rng.choice``).

    Methods of what the function itself belongs to are the user's, and may do what they want.
    """
    if path is None or not path.steps or path.root not in ("unknown", "local", "cell"):
        return False
    is_own = len(path.steps) == 1 and path.name in function.__code__.co_varnames[:1]
    return path.steps[-1] in _READERS and not is_own


def _named(path: Path | None, function: types.FunctionType) -> Any:
    """Return what a path of globals, builtins and modules leads to."""
    if path is None or path.root != "global":
        return _MISSING
    value = function.__globals__.get(path.name, _MISSING)
    if value is _MISSING:
        builtins = function.__globals__.get("__builtins__", {})
        table = vars(builtins) if isinstance(builtins, types.ModuleType) else builtins
        value = table.get(path.name, _MISSING)
    for step in path.steps:
        value = getattr(value, step, _MISSING) if isinstance(value, types.ModuleType) else _MISSING
    return value
