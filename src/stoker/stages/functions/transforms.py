"""Transforms of other libraries as functions of a value and a generator, known by what they offer.

- ``set_random_seed``, as Albumentations has it: called with ``image=`` for an array, or with the
  fields of an example, and seeded for each call.
- ``torch.nn.Module`` without a parameter for a generator, as torchvision's (v2) and Kornia's: its
  draws come from a generator of its own (``torch_draws``), seeded for each call, and move no other.

Both may keep what they draw in themselves, so they must not be declared safe for threads.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stoker.basics.pytree import Together

# Seeds of 32 bits: all libraries take them.
_SEEDS = 1 << 32


def call_without_rng(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function of a value for ``.map()``."""
    if takes_seed(fn):
        return _by_name(fn)
    return _with_plain_tuples(fn) if takes_no_rng(fn) else fn


def call_with_rng(fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a function of a value and a generator for ``.random_map()``.

    It need not pickle: it is made where it is called.
    """
    if takes_seed(fn):
        return _Seeded(fn)
    return _Drawing(fn) if takes_no_rng(fn) else fn


def takes_no_rng(fn: Any) -> bool:
    """Return whether it is a module of torch that is called with values alone.

    Not where its ``forward`` requires a second argument, or has one that is called ``rng``.
    """
    kind = getattr(sys.modules.get("torch.nn"), "Module", None)  # None while it is being imported
    if kind is None or not isinstance(fn, kind):
        return False
    parameters = list(inspect.signature(fn.forward).parameters.values())[1:2]
    return not any(
        p.name == "rng" or (p.default is p.empty and p.kind is not p.VAR_POSITIONAL)
        for p in parameters
        if p.kind is not p.VAR_KEYWORD
    )


def takes_seed(fn: Any) -> bool:
    """Return whether it is seeded by ``set_random_seed``, and so called with names."""
    return callable(getattr(fn, "set_random_seed", None)) and not isinstance(fn, type)


def _with_plain_tuples(module: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a module that gets several fields as a tuple: torch looks into no other type."""

    def call(value: Any) -> Any:
        return module(tuple(value) if isinstance(value, Together) else value)

    return call


def _by_name(transform: Callable[..., Any]) -> Callable[[Any], Any]:
    def call(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return transform(image=value)["image"]
        if isinstance(value, Mapping):
            return transform(**value)
        if hasattr(value, "_asdict"):
            return value._replace(**transform(**value._asdict()))
        name = getattr(transform, "__name__", type(transform).__name__)
        raise TypeError(
            f"{name} takes an array, or an example with names for its fields, not "
            f"{type(value).__name__}: "
            + ("leave on= out" if isinstance(value, Together) else "choose the field with on=")
        )

    return call


class _Seeded:
    """A transform that is seeded before each call."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform

    def __call__(self, value: Any, rng: np.random.Generator) -> Any:
        if not isinstance(rng, np.random.Generator):
            raise TypeError(
                "a transform with set_random_seed works on arrays of NumPy: put it before "
                ".to_torch()"
            )
        self._transform.set_random_seed(int(rng.integers(_SEEDS)))
        return _by_name(self._transform)(value)


class _Drawing:
    """A module of torch whose draws are keyed for each call."""

    def __init__(self, module: Any) -> None:
        self._call = _with_plain_tuples(module)

    def __call__(self, value: Any, rng: Any) -> Any:
        from stoker.stages.functions.torch_draws import KeyedDraws

        with KeyedDraws(rng):
            return self._call(value)
