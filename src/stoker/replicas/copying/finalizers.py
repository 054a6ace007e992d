"""Silences ``__del__`` of copies: it would delete the file, or free the handle, of the original.

In a worker process of ``DataLoader`` it does not run either, as objects end with the process.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

_silent: set[int] = set()
"""``id`` of each living object whose ``__del__`` does nothing."""
_guards: weakref.WeakSet[Callable[[Any], None]] = weakref.WeakSet()


def silence(copy: Any) -> None:
    """Have ``__del__`` do nothing for this object."""
    for base in type(copy).__mro__:
        finalize = vars(base).get("__del__")
        if finalize is not None:
            if isinstance(finalize, types.FunctionType):
                if finalize not in _guards:
                    type.__setattr__(base, "__del__", _guard(finalize))
                _silent.add(id(copy))
            return


def restore(copy: Any) -> None:
    """Have ``__del__`` run for this object after all."""
    _silent.discard(id(copy))


def _guard(finalize: types.FunctionType) -> Callable[[Any], None]:
    silent = _silent  # the module may be gone when the last objects are

    @functools.wraps(finalize)
    def __del__(self: Any) -> None:
        if id(self) in silent:
            silent.discard(id(self))
        else:
            finalize(self)

    _guards.add(__del__)
    return __del__
