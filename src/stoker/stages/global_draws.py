"""Whether a random map draws from global generators, and not from the one that it is given."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from stoker import pytree

_CALLS = 8


class GlobalDraws:
    """Looks at the first calls of one random map, in whatever threads and epochs they come.

    Other threads may move a global generator at any time, so the evidence is that nothing was drawn
    from ``rng`` in any of the calls, while one and the same generator moved in all of them. States
    are only read, and so is what the map draws. A copy in another process looks at the calls there.
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
            own, others = _state_of(rng), _global_states()
            made = fn(value, rng)
            if not self.looks:
                return made
            after = _global_states() if _state_of(rng) == own else {}
            self._moved &= {name for name in after if after[name] != others.get(name)}
            if not self._moved:
                self._left.clear()
            elif self._one_less() == 0:
                tell(" and ".join(sorted(self._moved)))
            return made

        return call

    def _one_less(self) -> int | None:
        try:
            return self._left.pop()
        except IndexError:  # another thread was faster
            return None


def _state_of(rng: Any) -> bytes:
    if isinstance(rng, np.random.Generator):
        return pickle.dumps(rng.bit_generator.state)
    if pytree.is_jax_array(rng):
        return b""  # a key: nothing moves when it is drawn from
    return bytes(rng.get_state().numpy())  # a torch.Generator


def _global_states() -> dict[str, bytes]:
    states = {
        "random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state(legacy=False)),
    }
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        states["torch"] = bytes(generator.get_state().numpy())
    return states
