"""Ranks that would all train on everything: warned of, once a process."""

from __future__ import annotations

import contextlib
from typing import Any

from stoker.caution import warn
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
    """Warn where each of several ranks iterates over all examples of a pipeline."""
    _warn(
        ".shard() gives each its part (.shard(rank=0, world=1) says that all are meant)", "examples"
    )


def warn_unsharded_loader(loader: Any) -> None:
    """Warn where each of several ranks iterates over a loader that nothing seems to divide.

    What a dataset does by itself cannot be told.
    """
    if _ranks() > 1 and not _divides(loader, _DEPTH):  # else nothing of it is touched
        _warn(
            "no DistributedSampler was found in it. DataLoader(dataset, "
            "sampler=DistributedSampler(dataset)) gives each its part. (Where the dataset divides "
            "itself, or all are meant: warnings.filterwarnings('ignore', 'each of '))",
            f"batches of the {type(loader).__name__}",
        )


def warn_unsharded_feed() -> None:
    """Warn where each of several ranks is handed all batches of a feed."""
    _warn(
        "have the feed serve examples (no .batch() there), and .shard() and .batch() them here",
        "batches of the feed",
    )


def _ranks() -> int:
    group = own_rank()
    return 1 if group is None else group[1]


def _warn(advice: str, what: str) -> None:
    if _ranks() > 1 and what not in _told:
        _told.add(what)
        warn(f"each of {_ranks()} ranks iterates over all {what}: {advice}")


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
