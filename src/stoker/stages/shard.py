"""Sharding: which part of an epoch is this process's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stoker.checks import is_whole_number
from stoker.machine import process_group


@dataclass(frozen=True)
class Shard:
    """The stage ``.shard()``.

    Attributes:
        rank, world, uneven: its arguments.
        assumed: whether this is taken for the only process because nothing tells of others.
    """

    rank: int
    world: int
    uneven: bool
    assumed: bool = False

    @property
    def name(self) -> str:
        """Name the stage for people."""
        return f"shard(rank={self.rank}, world={self.world}{', uneven' * self.uneven})"


def shard_of(rank: Any, world: Any, uneven: Any) -> Shard:
    """Check the arguments of ``.shard()``; without them the process group is asked.

    Where there is none, and a launcher's ``WORLD_SIZE`` does not tell of others, this is the only
    process.

    Raises ValueError or TypeError for what is no rank.
    """
    if (rank is None) != (world is None):
        raise ValueError(".shard() needs rank= and world= together, or neither")
    assumed = False
    if rank is None:
        group = process_group()
        launched = os.environ.get("WORLD_SIZE", "1")
        assumed = group is None
        if assumed and launched.strip() not in ("", "1"):
            raise ValueError(
                f".shard() found no process group, but WORLD_SIZE={launched} in the environment: "
                "call torch.distributed.init_process_group first, or give rank= and world="
            )
        rank, world = group or (0, 1)
    for name, value in (("rank", rank), ("world", world)):
        if not is_whole_number(value):
            raise TypeError(f".shard() takes {name}= as a whole number, not {value!r}")
    if not 0 <= rank < world:
        raise ValueError(f".shard(): a rank lies between 0 and world - 1; rank={rank}, {world=}")
    return Shard(int(rank), int(world), bool(uneven), assumed)


def check_assumed(stages: Iterable[Any]) -> None:
    """Raise ValueError where a shard was taken for the only one, and a process group came later."""
    group = process_group()
    if group is not None and group[1] > 1:
        for stage in stages:
            if isinstance(stage, Shard) and stage.assumed:
                raise ValueError(
                    f".shard() stood before init_process_group, and left all examples to each of "
                    f"{group[1]} ranks: build the pipeline behind it, or give rank= and world="
                )
