"""A loader that nobody divides, under a process group of several ranks, is warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from scripts import script

# torch's own stand-in for a group of any size within one process: nothing is sent.
GROUP = """
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=WORLD - 1, world_size=WORLD, store=FakeStore())

data = TensorDataset(torch.arange(16))
distributed = DistributedSampler(data)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(16))


class OwnBatches(BatchSampler):  # as accelerate's: it divides by itself
    num_processes, process_index = 2, 1


LOADERS = {
    "plain": DataLoader(data, 4),
    "shuffled": DataLoader(data, 4, shuffle=True),
    "batches": DataLoader(data, batch_sampler=BatchSampler(range(16), 4, False)),
    "stream": DataLoader(Stream(), 4),
    "list": [torch.arange(4)] * 4,
    "distributed": DataLoader(data, 4, sampler=distributed),
    "distributed batches": DataLoader(data, batch_sampler=BatchSampler(distributed, 4, False)),
    "own batches": DataLoader(data, batch_sampler=OwnBatches(range(16), 4, False)),
}
WRAPS = {
    "echo": lambda loader: stoker.echo(loader, 2),
    "monitor": stoker.monitor,
    "both": lambda loader: stoker.monitor(stoker.echo(loader, 2)),
}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name in NAMES:
        train = WRAPS[WRAP](LOADERS[name])
        list(train)
        list(train)
say(json.dumps([[str(w.message), os.path.basename(w.filename)] for w in caught]))
"""


def warned(folder: Path, wrap: str, names: list[str], world: int = 2) -> Any:
    with script(folder, f"WORLD, WRAP, NAMES = {world}, {wrap!r}, {names!r}\n{GROUP}") as running:
        told = json.loads(running.line())
        assert running.finish()[0] == 0
    return told


@pytest.mark.parametrize("wrap", ["echo", "monitor", "both"])
def test_ranks_that_each_take_everything_are_warned_of_once(tmp_path: Path, wrap: str) -> None:
    names = ["distributed", "distributed batches", "own batches", "plain", "batches", "shuffled"]
    ((message, filename),) = warned(tmp_path, wrap, names)
    assert message.startswith("each of 2 ranks iterates over all batches of the DataLoader")
    assert "DistributedSampler" in message
    assert filename == "script.py"


@pytest.mark.parametrize("name", ["batches", "stream", "list"])
def test_whatever_the_loader_is(tmp_path: Path, name: str) -> None:
    assert len(warned(tmp_path, "echo", [name])) == 1


def test_one_rank_has_everything_by_right(tmp_path: Path) -> None:
    assert warned(tmp_path, "echo", ["plain", "list"], world=1) == []


def test_without_a_group_nothing_of_a_loader_is_looked_at() -> None:
    class Closed:
        def __iter__(self) -> Any:
            return iter([np.arange(2)])

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    asked: list[str] = []
    list(stoker.echo(Closed(), 2))
    assert not {"sampler", "batch_sampler", "num_replicas"} & set(asked)
