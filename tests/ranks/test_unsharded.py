"""A loader that nobody divides, under a process group of several ranks, is warned of."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import stoker
from scripts import script
from strategies import one_in

# torch's own stand-in for a group of any size within one process: nothing is sent.
GROUP = """
import types
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

data = TensorDataset(torch.arange(16))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(16))


class OwnBatches(BatchSampler):  # as accelerate's: it divides by itself
    num_processes, process_index = 2, 1


def loaders():
    distributed = DistributedSampler(data)
    return {
        "plain": DataLoader(data, 4),
        "shuffled": DataLoader(data, 4, shuffle=True),
        "batches": DataLoader(data, batch_sampler=BatchSampler(range(16), 4, False)),
        "stream": DataLoader(Stream(), 4),
        "list": [torch.arange(4)] * 4,
        "distributed": DataLoader(data, 4, sampler=distributed),
        "distributed batches": DataLoader(data, batch_sampler=BatchSampler(distributed, 4, False)),
        "own batches": DataLoader(data, batch_sampler=OwnBatches(range(16), 4, False)),
    }


def called_as(module):
    # A function that iterates, as if a module of this name did.
    there = {"__name__": module}
    exec("def iterate(train): return list(train)", there)
    return there["iterate"]


def accelerated(train):
    state = types.ModuleType("accelerate.state")  # all that is looked at
    state.AcceleratorState = types.SimpleNamespace(_shared_state={"device": "cpu"})
    state.GradientState = types.SimpleNamespace(_shared_state={})
    sys.modules["accelerate.state"] = state
    list(train)


WRAPS = {
    "echo": lambda loader: stoker.echo(loader, 2),
    "monitor": stoker.monitor,
    "both": lambda loader: stoker.monitor(stoker.echo(loader, 2)),
}


def refused(framework, what):
    train = stoker.echo(loaders()[what], 2) if what != "pipeline" else (
        stoker.from_arrays(np.arange(16), seed=0).batch(4)
    )
    iterate = accelerated if framework == "accelerate" else called_as(framework)
    try:
        iterate(train)
    except ValueError as error:
        return str(error)
    return None


def warned(world, wrap, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    made = loaders()
    if world > 1 and wrap == "refused":
        say(json.dumps([refused(*names)]))
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in names:
            train = WRAPS[wrap](made[name])
            list(train)
            list(train)
    say(json.dumps([[str(w.message), os.path.basename(w.filename)] for w in caught]))


for case in CASES:
    if not (pid := os.fork()):  # each in a process of its own, that need not import torch
        warned(*case)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""

SEVERAL = ["distributed", "distributed batches", "own batches", "plain", "batches", "shuffled"]
CASES = {
    **{wrap: (2, wrap, SEVERAL) for wrap in ("echo", "monitor", "both")},
    **{name: (2, "echo", [name]) for name in ("batches", "stream", "list")},
    "one rank": (1, "echo", ["plain", "list"]),
    **{
        f"{framework} {what}": (2, "refused", [framework, what])
        for framework in ("pytorch_lightning.loops.fetchers", "accelerate")
        for what in ("pipeline", "plain", "distributed", "own batches")
    },
}


@pytest.fixture(scope="module")
def warned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was warned of in each case: messages, and the files that they point to."""
    program = f"CASES = {list(CASES.values())!r}\n{GROUP}"
    with script(tmp_path_factory.mktemp("ranks"), program) as running:
        code, out, errors = running.finish()
    assert code == 0, errors
    return dict(zip(CASES, map(json.loads, out.splitlines()), strict=True))


@pytest.mark.parametrize("wrap", one_in(3, ["echo", "monitor", "both"]))
def test_ranks_that_each_take_everything_are_warned_of_once(
    warned: dict[str, Any], wrap: str
) -> None:
    ((message, filename),) = warned[wrap]
    assert message.startswith("each of 2 ranks iterates over all batches of the DataLoader")
    assert "DistributedSampler" in message
    assert filename == "script.py"


def test_whatever_the_loader_is_but_on_one_rank(warned: dict[str, Any]) -> None:
    for name in ("batches", "stream", "list"):
        assert len(warned[name]) == 1
    assert warned["one rank"] == []


@pytest.mark.parametrize("framework", ["pytorch_lightning.loops.fetchers", "accelerate"])
def test_a_framework_that_distributes_is_told_what_to_add(
    warned: dict[str, Any], framework: str
) -> None:
    name = "Accelerate" if framework == "accelerate" else "Lightning"
    for what, line in (("pipeline", ".shard()"), ("plain", "gives each its part")):
        (message,) = warned[f"{framework} {what}"]
        assert message.startswith(f"under {name} each of 2 ranks iterates over all ")
        assert line in message
    for divided in ("distributed", "own batches"):
        assert warned[f"{framework} {divided}"] == [None]


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
