"""This process's rank among those of its job, as launchers and frameworks tell it."""

from __future__ import annotations

import os
import sys
from typing import Any


def process_group() -> tuple[int, int] | None:
    """Return rank and world size of torch's process group; None if there is none.

    It does not import torch: a process with a process group has imported it.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def own_rank() -> tuple[int, int] | None:
    """Return rank and world size from torch's process group, JAX or Ray Train; None without them.

    It imports none of them: a rank of theirs has imported them.
    """
    return process_group() or _rank_in_jax() or rank_in_ray()


def _rank_in_jax() -> tuple[int, int] | None:
    jax: Any = sys.modules.get("jax")
    if jax is None or not getattr(jax.distributed, "is_initialized", bool)():
        return None
    return jax.process_index(), jax.process_count()


def rank_in_ray() -> tuple[int, int] | None:
    """Return rank and world size in a training function of Ray Train; None outside of one."""
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        rank, world = context.get_world_rank(), context.get_world_size()
    except Exception:  # outside a training function; each version of Ray raises another type
        return None
    return None if rank is None or world is None else (int(rank), int(world))


def hosts_of_job() -> int:
    """Return the number of hosts of a torchrun job; 1 if it is unknown."""
    world = os.environ.get("WORLD_SIZE", "1")
    local = os.environ.get("LOCAL_WORLD_SIZE", world)
    if not world.isdigit() or not local.isdigit() or not int(local):
        return 1
    return -(-int(world) // int(local))
