"""Draws from global generators: noticed, or replaced by a generator of one's own.

A module draws from torch's global generator, which all threads share. Here each random operation
of the calling thread is given a generator instead, below the module (``TorchDispatchMode``), so
that nothing global moves and no other thread has a part in it. Imports torch.
"""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.basics import global_generators, pytree

# One generator has to move in all of these calls; another thread's draws hardly do so eight times.
# Chosen, not measured.
_CALLS = 8
WORKER_NAME = "stoker-worker"
"""How the names of worker threads begin; that of worker processes."""


class GlobalDraws:
    """Looks at the first calls of one map or filter, in whatever epochs they come.

    Other threads may move a global generator at any time, so the evidence is that one and the same
    generator moved in all of these calls; and that a random map drew nothing from ``rng`` in any of
    them. Other maps, and filters, are looked at where no worker is there that might draw meanwhile.
    States are only read, and so is what a random map draws. A copy in another process looks at the
    calls there, but at those of random maps alone: there each use has global generators of its own.
    """

    def __init__(self) -> None:
        self._left = list(range(_CALLS))  # taken from the end: one thread alone gets the 0
        self._moved = {"random", "numpy.random", "torch"}

    @property
    def looks(self) -> bool:
        """Whether there is something to look at still."""
        return bool(self._left)

    def settle(self) -> bool:
        """Look no further; return whether this is the first time."""
        first, self._moved = bool(self._moved), set()
        self._left.clear()
        return first

    def watched(
        self, fn: Callable[[Any, Any], Any], tell: Callable[[str], None]
    ) -> Callable[..., Any]:
        """Return ``fn``, looked at; ``tell`` is called with the names of the generators, once."""

        def call(value: Any, rng: Any) -> Any:
            own, others = _state_of(rng), global_generators.states()
            made = fn(value, rng)
            drew_own = _state_of(rng) != own
            self._see(set() if drew_own else global_generators.moved(others), tell)
            return made

        return call

    def watched_alone(
        self, fn: Callable[..., Any], tell: Callable[[str], None]
    ) -> Callable[..., Any]:
        """Return a function that is given no ``rng``, looked at where no worker is there."""

        def call(value: Any) -> Any:
            if _has_workers():
                return fn(value)
            others = global_generators.states()
            made = fn(value)
            self._see(global_generators.moved(others), tell)
            return made

        return call

    def _see(self, moved: set[str], tell: Callable[[str], None]) -> None:
        if not self.looks:
            return
        self._moved &= moved
        if not self._moved:
            self._left.clear()
        elif self._one_less() == 0:
            tell(" and ".join(sorted(self._moved)))

    def _one_less(self) -> int | None:
        try:
            return self._left.pop()
        except IndexError:  # another thread was faster
            return None


def _has_workers() -> bool:
    """Tell whether worker threads of any pipeline run, or this is a worker process."""
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.current_process().name == WORKER_NAME:
        return True
    return any(thread.name.startswith(WORKER_NAME) for thread in threading.enumerate())


def _state_of(rng: Any) -> bytes:
    if isinstance(rng, np.random.Generator):
        return pickle.dumps(rng.bit_generator.state)
    if pytree.is_jax_array(rng):
        return b""  # a key: nothing moves when it is drawn from
    return bytes(rng.get_state().numpy())  # a torch.Generator


class KeyedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, random operations of this thread draw from generators of its own.

    They are seeded from ``rng`` where something is first drawn, one for each kind of device.
    What takes no generator (recurrent layers) draws from the global one as ever.

    Args:
        rng: a ``numpy.random.Generator``, or a ``torch.Generator`` that was seeded.
    """

    def __init__(self, rng: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rng = rng
        is_torch = isinstance(rng, torch.Generator)
        self._seed: int | None = rng.initial_seed() if is_torch else None
        self._generators: dict[str, torch.Generator] = {rng.device.type: rng} if is_torch else {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        keyed = _with_generator(func)
        if keyed is not None and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator(_device(args, kwargs))}
            func = keyed
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        found = self._generators.get(device.type)
        if found is None:
            if self._seed is None:
                self._seed = int(self._rng.integers(1 << 63))
            found = self._generators[device.type] = torch.Generator(device)
            found.manual_seed(self._seed)
        return found


@functools.cache
def _with_generator(op: Any) -> Any:
    """Return the overload of a random operation that takes a generator, None where there is none.

    None as well for what is not random.
    """
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    wanted = _names(op) - {"generator"}
    overloads = [op, *(getattr(op.overloadpacket, n) for n in op.overloadpacket.overloads())]
    return next((each for each in overloads if _names(each) == wanted | {"generator"}), None)


def _names(op: Any) -> set[str]:
    return {argument.name for argument in op._schema.arguments}


def _device(args: Any, kwargs: Any) -> torch.device:
    tensor = next((each for each in args if isinstance(each, torch.Tensor)), None)
    if tensor is not None:
        return tensor.device
    return torch.device(kwargs.get("device") or "cpu")
