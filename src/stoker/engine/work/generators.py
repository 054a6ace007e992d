"""Random generators on devices; and warnings of functions that draw from global ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.warn import warn
from stoker.schedule import rng
from stoker.stages.functions.operation import Operation
from stoker.stages.map import Map

UndeclaredRng = tuple[int | Operation, str]
"""The positions of random maps that draw from global generators, and the generators' names."""


def warn_of_misdrawn(maps: Sequence[Map], misdrawn: list[UndeclaredRng]) -> None:
    """Warn once of each map and filter that draws from global generators."""
    while misdrawn:
        found, names = misdrawn.pop()
        stage = maps[found] if isinstance(found, int) else found
        if stage.draws.settle():
            warn(stage.says_of(names))


def device_generator(key: NDArray[np.uint64], place: int, use_key: int, batch: Any) -> Any:
    """Return a ``torch.Generator`` on a batch's device; for arrays of JAX, a key of JAX."""
    for leaf in pytree.leaves(batch):
        if pytree.is_tensor(leaf):
            import torch

            generator = torch.Generator(leaf.device)
            generator.manual_seed(rng.integer_at(key, place, use_key))
            return generator
        if pytree.is_jax_array(leaf):
            import jax

            # JAX takes seeds of 32 bits, unless 64-bit numbers are switched on.
            return jax.random.key(rng.integer_at(key, place, use_key) >> 31)
    return None
