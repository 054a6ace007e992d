"""Sharding: which part of an epoch is this process's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Shard:
    """The stage ``.shard()``."""

    rank: int
    world: int
    uneven: bool

    @property
    def name(self) -> str:
        """Name the stage for people."""
        return f"shard(rank={self.rank}, world={self.world}{', uneven' * self.uneven})"


def process_group() -> tuple[int, int] | None:
    """Return rank and world size of torch's process group, or None where none is initialised.

    Does not import torch: who has a process group has imported it.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def shard_of(rank: Any, world: Any, uneven: Any) -> Shard:
    """Check the arguments of ``.shard()``; without them the process group is asked.

    Raises ValueError or TypeError for what is no rank.
    """
    if (rank is None) != (world is None):
        raise ValueError(".shard() needs rank= and world= together, or neither")
    if rank is None:
        group = process_group()
        if group is None:
            raise ValueError(
                ".shard() found no process group: call torch.distributed.init_process_group "
                "first, or give rank= and world="
            )
        rank, world = group
    for name, value in (("rank", rank), ("world", world)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f".shard() takes {name}= as a whole number, not {value!r}")
    if not 0 <= rank < world:
        raise ValueError(f".shard(): a rank lies between 0 and world - 1; rank={rank}, {world=}")
    return Shard(int(rank), int(world), bool(uneven))
