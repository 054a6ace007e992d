"""Tables of functions and methods, by name: which of them change their arguments."""

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
"""Functions that set something for all threads of a process."""
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
"""Functions that do not change their arguments."""
_READERS = frozenset(
    {
        "choice", "choices", "sample", "permutation", "join", "extend", "update", "union",
        "intersection", "difference", "isdisjoint", "issubset", "issuperset", "writelines",
    }
)  # fmt: skip
"""Methods, of any object, that do not change containers among their arguments."""
_WRITERS = frozenset(
    {
        "shuffle", "heapify", "heappush", "heappop", "heappushpop", "heapreplace", "insort",
        "insort_left", "insort_right", "setattr", "getattr", "setitem", "delitem", "cast", "copyto",
        "put", "place", "exec", "eval", "next",
    }
)  # fmt: skip
"""Functions of packages and of Python that change their arguments, or hand them on."""
WRITES_ATTRIBUTES = frozenset(
    {"__setattr__", "__delattr__", "setattr", "delattr", "__dict__", "vars", "exec", "eval"}
)
"""Names whose use in a method may set attributes in ways that are not followed."""
PASSED_TO = frozenset(
    Path("global", name) for name in ("super", "isinstance", "type", "len", "repr", "str", "id")
)
"""Functions that do not change a method's ``self`` when they are given it."""


def is_harmless(path: Path | None, function: types.FunctionType) -> bool:
    value = _resolve(path, function)
    try:
        return value in _HARMLESS
    except TypeError:
        return False


def is_packages_reader(path: Path | None, function: types.FunctionType) -> bool:
    """True if a path leads to a function of a package or of Python that only reads.

    Nearly all of them only read, so the list is of the ones that write.
    """
    value = _resolve(path, function)
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
    """True if a path leads to a method that only reads, by its name (``rng.choice``).

    Methods of the function's own object are the user's, and may do anything.
    """
    if path is None or not path.steps or path.root not in ("unknown", "local", "cell"):
        return False
    is_own = len(path.steps) == 1 and path.name in function.__code__.co_varnames[:1]
    return path.steps[-1] in _READERS and not is_own


def _resolve(path: Path | None, function: types.FunctionType) -> Any:
    """Return the value at a path of globals, builtins and modules."""
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
