"""Random generators on devices: made for each call, from the address of the use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.schedule import rng


def device_generator(key: NDArray[np.uint64], place: int, use: int, batch: Any) -> Any:
    """Return a ``torch.Generator`` on a batch's device; for arrays of JAX, a key of JAX."""
    for leaf in pytree.leaves(batch):
        if pytree.is_tensor(leaf):
            import torch

            generator = torch.Generator(leaf.device)
            generator.manual_seed(rng.integer_at(key, place, use))
            return generator
        if pytree.is_jax_array(leaf):
            import jax

            # JAX takes seeds of 32 bits, unless 64-bit numbers are switched on.
            return jax.random.key(rng.integer_at(key, place, use) >> 31)
    return None
