"""The global random generators of Python, NumPy and torch, and whether they were drawn from."""

from __future__ import annotations

import pickle
import random
import sys

import numpy as np


def states() -> dict[str, bytes]:
    """Return the state of each, by name; torch's where it was imported. Nothing is drawn."""
    found = {
        "random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state(legacy=False)),
    }
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        found["torch"] = bytes(generator.get_state().numpy())
    return found


def moved(before: dict[str, bytes]) -> set[str]:
    """Return the names of those that are not as they were. Any thread may have drawn from them."""
    return {name for name, state in states().items() if before.get(name, state) != state}
