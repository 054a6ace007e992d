"""The global random generators of Python, NumPy and torch: finds out whether code used them."""

from __future__ import annotations

import pickle
import random
import sys

import numpy as np


def states() -> dict[str, bytes]:
    """Return the generators' states by name; torch's only if torch is imported. Draws nothing."""
    found = {
        "random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state(legacy=False)),
    }
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        found["torch"] = bytes(generator.get_state().numpy())
    return found


def changed_since(before: dict[str, bytes]) -> set[str]:
    """Return the names of generators whose state has changed; any thread may have used them."""
    return {name for name, state in states().items() if before.get(name, state) != state}
