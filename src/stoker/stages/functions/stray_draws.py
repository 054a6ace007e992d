"""Whether a map draws from global generators: a random one not from the one that it is given."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

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

    def watch(self, fn: Callable[..., Any], tell: Callable[[str], None]) -> Callable[..., Any]:
        """Return ``fn``, looked at; ``tell`` is called with the names of the generators, once."""

        def call(value: Any, rng: Any, *time: Any) -> Any:
            own, others = _state_of(rng), global_generators.states()
            made = fn(value, rng, *time)
            drew_own = _state_of(rng) != own
            self._see(set() if drew_own else global_generators.changed_since(others), tell)
            return made

        return call

    def watch_without_rng(
        self, fn: Callable[..., Any], tell: Callable[[str], None]
    ) -> Callable[..., Any]:
        """Return a function that is given no ``rng``, looked at where no worker is there."""

        def call(value: Any, *time: Any) -> Any:
            if _has_workers():
                return fn(value, *time)
            others = global_generators.states()
            made = fn(value, *time)
            self._see(global_generators.changed_since(others), tell)
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
