"""Sharding: which part of an epoch is this process's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.checks import is_whole_number
from stoker.machine import own_rank, process_group
from stoker.orders import Share
from stoker.stages.stage import PoolSize, Stage, Traits, first_with

if TYPE_CHECKING:
    from stoker.chain import Chain
    from stoker.engine.lower import Lowering


@dataclass(frozen=True)
class Shard(Stage):
    """The stage ``.shard()``.

    Attributes:
        rank, world, uneven: its arguments.
        near: whether it deals inside the global batch to where a cache keeps what.
        assumed: whether this is taken for the only process because nothing tells of others.
    """

    rank: int
    world: int
    uneven: bool
    near: bool = False
    assumed: bool = False
    traits = Traits(selects=True, shards=True, keeps_fields=True)

    @staticmethod
    def of(rank: Any, world: Any, uneven: Any, near: Any) -> Shard:
        """Check the arguments of ``.shard()``; without them torch, JAX and Ray Train are asked.

        Where none of them tells, nor a launcher's ``WORLD_SIZE``, this is the only process.

        Raises ValueError or TypeError for what is no rank.
        """
        if near not in (None, "cache"):
            raise ValueError(f".shard() takes near='cache' or nothing, not {near!r}")
        if near is not None and uneven:
            raise ValueError(
                ".shard(near='cache') deals equal parts: for evaluation, leave near= out"
            )
        if (rank is None) != (world is None):
            raise ValueError(".shard() needs rank= and world= together, or neither")
        assumed = False
        if rank is None:
            group = own_rank()
            launched = os.environ.get("WORLD_SIZE", "1")
            assumed = group is None
            if assumed and launched.strip() not in ("", "1"):
                raise ValueError(
                    f".shard() found no process group, but WORLD_SIZE={launched} in the "
                    "environment: call torch.distributed.init_process_group first, or give rank= "
                    "and world="
                )
            rank, world = group or (0, 1)
        for name, value in (("rank", rank), ("world", world)):
            if not is_whole_number(value):
                raise TypeError(f".shard() takes {name}= as a whole number, not {value!r}")
        if not 0 <= rank < world:
            raise ValueError(
                f".shard(): a rank lies between 0 and world - 1; rank={rank}, {world=}"
            )
        return Shard(int(rank), int(world), bool(uneven), near is not None, assumed)

    @property
    def name(self) -> str:
        how = ", uneven" * self.uneven + ", near='cache'" * self.near
        return f"shard(rank={self.rank}, world={self.world}{how})"

    def placed(self, before: Chain) -> Shard:
        """Check that it stands where numbers alone say what is whose."""
        if before.source.yields_batches:
            raise ValueError(
                "a loader is sharded by its sampler (DistributedSampler): set it there"
            )
        stage = first_with(before.stages, lambda t: t.shards or not (t.selects or t.inside))
        if stage is not None:
            raise ValueError(
                f".shard() cannot follow {stage.name}: put it right behind the source or "
                "behind .shuffle()"
            )
        if before.source.has_own_order and (self.near or self.uneven):
            raise ValueError(
                "of a mixture all ranks get equally much of each part: leave uneven= and near= out"
            )
        if self.near and first_with(before.stages, lambda t: t.shuffles) is None:
            raise ValueError(
                ".shard(near='cache') deals what an epoch draws: put .shuffle() before it"
            )
        if self.near and not before.source.is_indexed:
            raise ValueError(
                ".shard(near='cache') deals examples by their numbers, and a stream has none"
            )
        return self

    def begin(self, chain: Chain) -> None:
        """Raise ValueError where others came later, or nothing says what is near."""
        group = own_rank()
        if self.near and chain.cluster is None:
            raise ValueError(
                ".shard(near='cache') deals by which node keeps what: add .cache(cluster=...), or "
                "leave near= out"
            )
        if self.near and self.world > 1 and process_group() is None:
            raise ValueError(
                ".shard(near='cache') needs a process group, in which ranks agree by whose parts "
                "they deal: call torch.distributed.init_process_group before, or leave near= out"
            )
        if self.assumed and group is not None and group[1] > 1:
            raise ValueError(
                f".shard() stood before init_process_group, and left all examples to each of "
                f"{group[1]} ranks: build the pipeline behind it, or give rank= and world="
            )

    def lower(self, to: Lowering) -> None:
        to.shard(self.rank, self.world, uneven=self.uneven, dealt=self.near)

    def count(self, items: int) -> int:
        return Share(self.rank, self.world, self.uneven, anew=False).count(items)

    def outline(self) -> str:
        """Return the world: ranks of equal length share a state."""
        if self.uneven:
            return self.name
        return f"shard(world={self.world}{', near=cache' * self.near})"

    def note(self, chain: Chain, sizes: Mapping[int, PoolSize]) -> str:
        """Say how parts compare."""
        if self.assumed:
            return "  one process: there is no process group"
        if self.near:
            return (
                f"  parts of equal length, dealt inside each {self.world * chain.batch_size:,} "
                "examples to where the cache keeps them: a rank's batches are others (BatchNorm), "
                "all ranks' together the same"
            )
        return "  all examples" if self.uneven else "  parts of equal length"
