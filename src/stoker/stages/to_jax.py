"""Batches as JAX arrays: on a device, or spread over several by a sharding.

JAX copies by itself while the host goes on, and keeps the host's arrays alive for as long as it
reads them. JAX is never imported here before somebody who has imported it names a place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from stoker import machine, pytree

_NUMERIC = "biufc"
_REGISTERED = 2  # NumPy's word for dtypes of other packages, as bfloat16 is


def is_jax_place(place: Any) -> bool:
    """Tell whether this is a ``jax.Device`` or a ``jax.sharding.Sharding``."""
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(place, (jax.Device, jax.sharding.Sharding))


def name_of(place: Any) -> str:
    """Name a device, or say over how many a sharding spreads arrays."""
    devices = getattr(place, "device_set", None)
    return str(place) if devices is None else f"{type(place).__name__} of {len(devices)} devices"


class JaxMover:
    """Moves batches to a place of JAX. Used by the consumer's thread alone.

    On a device each array becomes one of JAX's. Under a sharding a batch is this process's part of
    a global one, as ``jax.make_array_from_process_local_data`` has it.
    """

    def __init__(self, place: Any, name: str) -> None:
        import jax

        self._jax: Any = jax
        self._place = place
        self._is_sharded = isinstance(place, jax.sharding.Sharding)
        self.name = name

    def usable_bytes(self) -> int:
        """Return the free memory of the fullest device; the host's where devices do not tell."""
        devices: Iterable[Any] = [self._place]
        if self._is_sharded:
            devices = self._place.addressable_devices
        told = [stats for stats in (device.memory_stats() for device in devices) if stats]
        free = [t["bytes_limit"] - t["bytes_in_use"] for t in told if "bytes_limit" in t]
        return int(min(free)) if free else machine.usable_memory_bytes()

    def start(self, batch: Any) -> Callable[[], Any]:
        """Begin to move a batch; call what is returned to have it. JAX waits where it is used."""
        moved = pytree.map_leaves(self._moved, batch)
        return lambda: moved

    def _moved(self, leaf: Any) -> Any:
        if pytree.is_tensor(leaf):
            leaf = leaf.detach().cpu().numpy()
        if not _is_numeric(leaf):
            return leaf
        if isinstance(leaf, np.ndarray):
            leaf = pytree.native(leaf)
        if not self._is_sharded:
            return self._jax.device_put(leaf, self._place)
        if pytree.is_jax_array(leaf):
            leaf = np.asarray(leaf)
        return self._jax.make_array_from_process_local_data(self._place, leaf)


def _is_numeric(leaf: Any) -> bool:
    if pytree.is_jax_array(leaf):
        return True
    return isinstance(leaf, np.ndarray) and (
        leaf.dtype.kind in _NUMERIC or leaf.dtype.isbuiltin == _REGISTERED
    )
