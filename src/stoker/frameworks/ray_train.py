"""Ray Train, whose workers have ranks."""

from __future__ import annotations

from typing import Any

from stoker.frameworks.framework import Framework
from stoker.frameworks.rank import rank_in_ray


class RayTrain(Framework):
    """A training function of Ray Train."""

    name = "Ray Train"
    where_ranks_are_known = "in the training function"

    def shards_data(self) -> bool:
        return rank_in_ray() is not None

    def way_to_shard(self, loader: Any) -> str | None:
        # Ray's own loaders are sharded elsewhere: only one with a sampler shows that it is not.
        if not hasattr(loader, "sampler"):
            return None
        return "stoker.echo(ray.train.torch.prepare_data_loader(loader)) gives each its part"
