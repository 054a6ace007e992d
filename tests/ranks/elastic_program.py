"""A rank under torchrun that may be killed, and goes on from the checkpoint of other ranks.

Run as ``elastic_program.py FOLDER KIND KEEPS DIES``: it saves behind each so many steps, and kills
itself in the step that ``DIES`` has beside its rank, once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import stoker

EXAMPLES = 1_013
LENGTH = 16
"""Tokens in a full sequence."""
GLOBAL_BATCH = 48
PACK_STEPS = 13
"""As many as all ranks have, though their documents differ; the last checkpoint is one before."""


@stoker.thread_safe
def drawing(x: Any, rng: np.random.Generator) -> Any:
    return x, rng.random()


def document(x: Any, rng: np.random.Generator) -> Any:
    """Make tokens that tell which they are, and what was drawn for their document."""
    return (int(x) * 100 + np.arange(x % 23)) * 1_000 + rng.integers(1_000)


def with_draws(packed: Any, rng: np.random.Generator) -> Any:
    return packed.tokens, np.full(LENGTH, rng.random())


KINDS: dict[str, Callable[[stoker.Pipeline, int], stoker.Pipeline]] = {
    "echo": lambda train, each: train.echo(2, pool=96).random_map(drawing).batch(each),
    "pack": lambda train, each: (
        train.random_map(document).pack(LENGTH).random_map(with_draws).batch(each)
    ),
}


def source() -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(EXAMPLES), seed=3).shuffle()


def main(folder: str, kind: str, keeps: int, dies: list[int]) -> None:
    """Train, as one of torchrun's ranks."""
    import torch
    import torch.distributed as dist

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        # A file for each try: in the agent's store gloo finds addresses of ranks that were killed.
        tried, world = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/ranks-{world}-{tried}",
            rank=int(os.environ["RANK"]),
            world_size=world,
        )
    rank = dist.get_rank()
    train = KINDS[kind](source().shard(), max(1, GLOBAL_BATCH // world))
    train = train.steps(PACK_STEPS) if kind == "pack" else train
    saved, begun = os.path.join(folder, "checkpoint.json"), time.monotonic()
    if os.path.exists(saved):
        with open(saved) as file:
            train.load_state_dict(json.load(file))
    with open(os.path.join(folder, f"{time.monotonic_ns()}-{rank}.jsonl"), "w") as log:
        for ids, draws in train:
            step = train.counts.steps
            killed = os.path.join(folder, "killed")
            if rank == dies[0] and step == dies[1] and not os.path.exists(killed):  # once
                with open(killed, "w") as file:
                    file.write(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            told = {
                "step": step,
                "world": world,
                "begun": begun,
                "ids": ids.ravel().tolist(),
                "uses": np.resize(train.last.number, ids.size).tolist(),
                "draws": draws.ravel().tolist(),
            }
            log.write(json.dumps(told) + "\n")
            log.flush()
            dist.all_reduce(torch.ones(1))
            if step % keeps == 0:
                save(train, saved)
    dist.barrier()
    dist.destroy_process_group()


def save(train: stoker.Pipeline, path: str) -> None:
    """Save the state of rank 0, or where ranks' states differ those of all."""
    import torch.distributed as dist

    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, train.state_dict())
    if dist.get_rank() == 0:
        with open(path + ".part", "w") as file:
            json.dump(states[0] if states == states[:1] * len(states) else states, file)
        os.replace(path + ".part", path)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
