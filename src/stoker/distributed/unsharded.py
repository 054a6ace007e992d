"""Warns if each of several ranks iterates over all of the data instead of its part.

Under a framework that shards data it is an error: the framework cannot shard a stoker pipeline, and
its users rely on sharding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from stoker.basics.warn import warn
from stoker.distributed.launchers import find_launcher
from stoker.frameworks.framework import SAMPLER, Framework
from stoker.frameworks.queries import sharding_framework
from stoker.frameworks.rank import own_rank

# Attributes of samplers, batch samplers and datasets that divide an epoch: torch's
# DistributedSampler and similar, accelerate's shards, DALI's readers. (Hugging Face's datasets:
# `_distributed`.)
_KNOWN = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("num_shards", "shard_id"),
    ("world_size", "rank"),
)
_INSIDE = ("sampler", "batch_sampler", "dataset", "base_dataloader", "loader")
# Loaders that wrap loaders, down to a sampler or a dataset; a cycle of them ends there. Chosen, not
# measured.
_DEPTH = 5

_warned: set[str] = set()


def warn_unsharded() -> None:
    """Warn if each of several ranks iterates over all examples of a pipeline.

    Raises ValueError under a framework that shards data, as do the functions below.
    """
    shard = (
        "add .shard(), so that each gets its part (or .shard(rank=0, world_size=1) if each should "
        "read everything)"
    )

    def under(framework: Framework) -> str:
        return f"build the pipeline {framework.where_ranks_are_known}, and {shard}"

    _tell("examples", shard, under)


def warn_unsharded_loader(loader: Any) -> None:
    """Warn if each of several ranks iterates over a loader that seems not to be sharded.

    A dataset may shard itself unnoticed.
    """
    if _ranks() < 2 or _divides(loader, _DEPTH):  # nothing of it is touched if there is one rank
        return
    how_to_declare = (
        "A dataset or a sampler that shards by itself declares that by attributes "
        "num_replicas and rank"
    )

    def under(framework: Framework) -> str | None:
        way = framework.way_to_shard(loader)
        return None if way is None else f"{way}. {how_to_declare}"

    _tell(
        f"batches of the {type(loader).__name__}",
        f"no DistributedSampler was found in it. {SAMPLER}. (If the dataset shards itself, or "
        "each rank should read everything: warnings.filterwarnings('ignore', 'each of '))",
        under,
    )


def warn_unsharded_feed() -> None:
    """Warn if each of several ranks receives all batches of a feed."""
    advice = "let the feed serve examples (no .batch() there), and add .shard() and .batch() here"
    _tell("batches of the feed", advice, lambda framework: advice)


def _ranks() -> int:
    """Return the number of ranks; without a process group, of the launcher's processes."""
    group, there = own_rank(), find_launcher()
    if group is None:
        return 1 if there is None else there.world
    return group[1]


def _tell(what: str, advice: str, under: Callable[[Framework], str | None]) -> None:
    """Warn once; raise ValueError if a framework shards data, and there is advice for it."""
    if _ranks() < 2:
        return
    text = f"each of {_ranks()} ranks iterates over all {what}: "
    # Processes of a launcher may have nothing to do with each other, so this is no error.
    framework = None if own_rank() is None else sharding_framework()
    if framework is not None and (its_advice := under(framework)) is not None:
        raise ValueError(f"under {framework.name} {text}{its_advice}")
    if what not in _warned:
        _warned.add(what)
        warn(text + advice)


def _divides(part: Any, depth: int) -> bool:
    """True if some object in a loader knows its rank among several."""
    if part is None or not depth:
        return False
    with contextlib.suppress(Exception):  # properties of foreign objects may raise anything
        for count, number in _KNOWN:
            if isinstance(getattr(part, count, None), int) and hasattr(part, number):
                return True
        if getattr(part, "_distributed", None) is not None:
            return True
    inside = []
    for name in _INSIDE:
        with contextlib.suppress(Exception):
            inside.append(getattr(part, name, None))
    return any(_divides(each, depth - 1) for each in inside)
