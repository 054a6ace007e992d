"""Named tuples and dataclasses of records: found by name among what is imported already."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from stoker.basics.pytree import longer

# Classes made here for named tuples that this process has not imported. Without a limit, damaged
# records could fill the memory with classes.
_MAX_MADE_CLASSES = 256


def find_class(name: str, names: Sequence[str], *, is_tuple: bool) -> type | None:
    """Return a class with these fields if it is imported already, else None. Imports nothing."""
    module, _, path = name.partition(":")
    main = sys.modules["__main__"]
    # The writer may have imported as a module the file that runs here as the script.
    is_script = os.path.basename(getattr(main, "__file__", None) or "") == f"{module}.py"
    for place in [sys.modules.get(module)] + [main] * is_script:
        found: Any = place
        for part in path.split("."):
            # Not getattr(): a module's ``__getattr__`` or a property would run its code.
            found = getattr(found, "__dict__", {}).get(part)
        if not isinstance(found, type):
            continue
        own = _field_names(found, is_tuple=is_tuple)
        if own == list(names):
            return found
        if is_tuple and own and own == list(names[: len(own)]):  # with fields of ``numbered()``
            made: type = functools.reduce(longer, names[len(own) :], found)
            return made
    return None


def _field_names(kind: type, *, is_tuple: bool) -> list[str] | None:
    if is_tuple and issubclass(kind, tuple):
        return list(getattr(kind, "_fields", [None]))
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


@functools.lru_cache(maxsize=_MAX_MADE_CLASSES)
def make_namedtuple(name: str, names: tuple[str, ...]) -> Any:
    return namedtuple(name, names)  # raises ValueError for invalid names
