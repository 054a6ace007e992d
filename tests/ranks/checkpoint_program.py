"""A rank under torchrun that goes on from a checkpoint of ``torch.distributed``, and saves another.

Run as ``checkpoint_program.py FOLDER LOADS SAVES``: of the names of checkpoints, either may be "".
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

import stoker

EXAMPLES = 1_013
GLOBAL_BATCH = 48
STEPS = 5
"""Batches that ranks take before they save."""
FILTERED_STEPS = 15
"""As many as all ranks have, though filters leave them unequal."""


def numbers() -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(EXAMPLES), seed=3).shuffle().shard()


@stoker.thread_safe
def is_kept(x: Any) -> bool:
    return bool(x % 5)


KINDS: dict[str, Callable[[int], stoker.Pipeline]] = {
    "plain": lambda each: numbers().batch(each),
    "dict": lambda each: numbers().batch(each),
    "echo": lambda each: numbers().echo(2, pool=96).batch(each),
    "filter": lambda each: numbers().filter(is_kept).batch(each).steps(FILTERED_STEPS),
}


def main(folder: str, loads: str, saves: str) -> None:
    """Train, as one of torchrun's ranks."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")  # torch's own
    dist.init_process_group("gloo")
    trains = {kind: make(GLOBAL_BATCH // dist.get_world_size()) for kind, make in KINDS.items()}

    def content() -> dict[str, Any]:
        return {k: p.state_dict() if k == "dict" else p for k, p in trains.items()}

    if loads:
        loaded = content()
        dcp.load(loaded, checkpoint_id=os.path.join(folder, loads))
        trains["dict"].load_state_dict(loaded["dict"])
    uses = dict[str, list[Any]]()
    for kind, train in trains.items():
        batches = iter(train)
        taken = islice(batches, STEPS) if saves else batches
        found = ((x.tolist(), train.last.number.tolist()) for x in taken)
        uses[kind] = [use for x, number in found for use in zip(x, number, strict=True)]
    if saves:
        dcp.save(content(), checkpoint_id=os.path.join(folder, saves))
    with open(os.path.join(folder, f"{loads}-{dist.get_rank()}.json"), "w") as file:
        json.dump(uses, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
