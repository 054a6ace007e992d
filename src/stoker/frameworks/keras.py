"""Keras: its ``fit`` calls the iterator of a pipeline."""

from __future__ import annotations

from typing import Any

from stoker.frameworks.framework import SAMPLER, Framework, is_calling


class Keras(Framework):
    """``fit``, ``evaluate`` and ``predict`` of Keras."""

    name = "Keras"
    where_ranks_are_known = "behind keras.distribution.initialize()"

    def shards_data(self) -> bool:
        return is_calling("keras.")

    def way_to_shard(self, loader: Any) -> str | None:
        # Generators are sharded elsewhere: only a loader with a sampler shows that it is not.
        if not hasattr(loader, "sampler"):
            return None
        return f"{SAMPLER}, with num_replicas= and rank="
