"""Ranks that would all train on everything: warned of, once a process.

Where a framework gives each rank its part of the data, it cannot do so here, and its users count on
it: that is an error.
"""

from __future__ import annotations

import contextlib
from typing import Any

from stoker.callers import distributing
from stoker.caution import warn
from stoker.launchers import launched
from stoker.machine import own_rank

# What samplers, batch samplers and datasets that divide an epoch know: torch's DistributedSampler
# and its like, accelerate's shards, DALI's readers. (Hugging Face's datasets: `_distributed`.)
_KNOWN = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("num_shards", "shard_id"),
    ("world_size", "rank"),
)
_INSIDE = ("sampler", "batch_sampler", "dataset", "base_dataloader", "loader")
_DEPTH = 5

_told: set[str] = set()


def warn_unsharded() -> None:
    """Warn where each of several ranks iterates over all examples of a pipeline.

    Raises ValueError where a framework distributes; so do the functions below.
    """
    shard = ".shard() gives each its part (.shard(rank=0, world=1) says that all are meant)"
    where = {
        "Lightning": "in train_dataloader(), where ranks are known",
        "Accelerate": "behind Accelerator()",
        "Ray Train": "in the training function",
        "Keras": "behind keras.distribution.initialize()",
    }
    within = {name: f"build the pipeline {at}, and {shard}" for name, at in where.items()}
    _tell("examples", shard, within)


def warn_unsharded_loader(loader: Any) -> None:
    """Warn where each of several ranks iterates over a loader that nothing seems to divide.

    What a dataset does by itself cannot be told. Ray's own and Keras's generators are divided
    elsewhere, so there only what has a sampler is refused.
    """
    if _ranks() < 2 or _divides(loader, _DEPTH):  # nothing of it is touched if there is one rank
        return
    sampler = "DataLoader(dataset, sampler=DistributedSampler(dataset)) gives each its part"
    says = "A dataset or a sampler that divides by itself says so by attributes num_replicas, rank"
    within = {
        "Lightning": f"{sampler}, made in train_dataloader(), where the ranks are known. {says}",
        "Accelerate": f"stoker.echo(accelerator.prepare(loader)) gives each its part. {says}",
    }
    if hasattr(loader, "sampler"):
        prepared = "stoker.echo(ray.train.torch.prepare_data_loader(loader)) gives each its part"
        within["Ray Train"] = f"{prepared}. {says}"
        within["Keras"] = f"{sampler}, with num_replicas= and rank=. {says}"
    _tell(
        f"batches of the {type(loader).__name__}",
        f"no DistributedSampler was found in it. {sampler}. (Where the dataset divides itself, or "
        "all are meant: warnings.filterwarnings('ignore', 'each of '))",
        within,
    )


def warn_unsharded_feed() -> None:
    """Warn where each of several ranks is handed all batches of a feed."""
    advice = "have the feed serve examples (no .batch() there), and .shard() and .batch() them here"
    framework = distributing()
    _tell("batches of the feed", advice, {} if framework is None else {framework: advice})


def _ranks() -> int:
    """Count the ranks that there are; where there is no group, the processes of a launcher."""
    group, there = own_rank(), launched()
    if group is None:
        return 1 if there is None else there.world
    return group[1]


def _tell(what: str, advice: str, within: dict[str, str]) -> None:
    """Warn once, or raise ValueError where what a framework's users are to do is given."""
    if _ranks() < 2:
        return
    told = f"each of {_ranks()} ranks iterates over all {what}: "
    # What a launcher started may have nothing to do with each other: that is no error.
    framework = None if own_rank() is None else distributing()
    if framework in within:
        raise ValueError(f"under {framework} {told}{within[framework]}")
    if what not in _told:
        _told.add(what)
        warn(told + advice)


def _divides(part: Any, depth: int) -> bool:
    """Whether something in a loader knows its rank among several."""
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
