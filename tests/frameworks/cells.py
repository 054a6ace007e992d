"""What training frameworks do with what stoker hands them: a program that the tests start.

    cells.py FOLDER FRAMEWORK KIND USE [KIND USE ...]

Each cell prints a line of JSON: its name, and what became of it: "works", or an error's text. What
works is asserted by the numbers of the examples that training saw. What else is said, and errors
with their tracebacks, is in FOLDER/said. A rank ends when its standard input does: the first one
serves the others, however late they come.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import sys
import traceback
import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import stoker

MODULES = {
    "Lightning": "of_lightning",
    "Accelerate": "of_accelerate",
    "Hugging Face Trainer": "of_transformers",
    "PyTorch": "of_pytorch",
    "Ray Train": "of_ray",
    "JAX": "of_jax",
    "Keras 3": "of_keras",
}
EXAMPLES, BATCH, EPOCHS = 48, 8, 2
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Seen = list[tuple[int, list[int]]]


class Numbered:
    """Examples that are their own numbers."""

    def __init__(self, examples: int = EXAMPLES) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.tensor(index)}


def chain() -> stoker.Pipeline[Any]:
    """What a feeder prepares where ranks take their parts of it."""
    return stoker.from_dataset(Numbered(), seed=0).shuffle()


def prepared() -> stoker.Pipeline:
    """What a feeder prepares for one trainer."""
    return chain().batch(BATCH)


def undivided(kind: str) -> stoker.Pipeline[Any]:
    """Return what each of several ranks would iterate over all of."""
    if kind == "echo(loader)":
        return stoker.echo(DataLoader(Numbered(), BATCH), 2)  # type: ignore[arg-type]
    return prepared()


def make(kind: str, framework: str, use: str, prepare: Any = None) -> Any:
    """Return what is trained on, as a user of the framework would make it.

    Args:
        kind, framework, use: of the cell.
        prepare: the framework's, which divides a loader between ranks.
    """
    ranks, scheduled = use == "2 processes", use == "schedule"
    torch.manual_seed(0)
    if kind == "pipeline":
        part = chain().shard() if ranks else chain()
        if scheduled:  # an epoch of a length of its own, whatever the factor
            return part.echo().batch(BATCH).repeat().steps(10)
        return part.batch(BATCH)
    if kind == "share":
        name = f"cells-{framework.split()[0]}-{use.replace(' ', '-')}-{os.environ['CELLS']}"
        if ranks:
            feed = stoker.feed(chain, name=name, jobs=WORLD)
            return feed.shard().batch(BATCH)
        feed = stoker.feed(prepared, name=name)
        return feed.repeat().steps(10) if scheduled else feed
    data: Any = Numbered()
    if kind == "cached":
        data = stoker.cached(data, version="1")
    sampler: Any = None
    if ranks and prepare is None and not (framework == "Lightning" and kind == "cached"):
        sampler = DistributedSampler(data, WORLD, RANK)
    if kind == "cached" and use == "resume":
        return StatefulDataLoader(data, BATCH, shuffle=True)
    loader = DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler)
    if kind == "cached":
        return loader
    if prepare is not None and ranks:
        loader = prepare(loader)
    if scheduled:
        return stoker.echo(loader, seed=0).repeat().steps(10)
    return stoker.echo(loader, 2, seed=0)


class Model(torch.nn.Module):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: Seen = []
        self.validated: list[int] = []
        self.epoch = 0

    def forward(self, ids: Any) -> dict[str, Any]:
        ids = torch.as_tensor(ids)
        if self.training:
            self.seen.append((self.epoch, ids.tolist()))
        else:
            self.validated += ids.tolist()
        return {"loss": (self.weight * ids.float()).sum() * 0, "logits": ids[:, None].float()}


def check_epochs(seen: Seen, times: int, epochs: int = EPOCHS) -> None:
    """Assert that each epoch had every example so many times."""
    for epoch in range(epochs):
        counts = Counter(i for at, ids in seen if at == epoch for i in ids)
        assert counts == dict.fromkeys(range(EXAMPLES), times), (epoch, counts)
    assert max(at for at, _ in seen) == epochs - 1


def of_torch_ranks(seen: Seen) -> list[Any]:
    """Return what each rank of the process group has seen."""
    of_all: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(of_all, seen)
    return of_all


def check_ranks(seen: Seen, times: int, gather: Any = of_torch_ranks) -> None:
    """Assert that the ranks together had every example so many times an epoch."""
    of_all = gather(seen)
    assert len({len(each) for each in of_all}) == 1, "ranks took unequally many steps"
    check_epochs([one for each in of_all for one in each], times)


def check_schedule(kind: str, rates: list[float], total: int) -> None:
    """Assert that a one-cycle schedule came to its end with the last step."""
    if kind == "cached":  # a DataLoader: its own length
        assert total == len(rates) == EPOCHS * 6
        return
    expected = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(expected, 1.0, total_steps=total)
    assert total == 10 * EPOCHS, total
    wanted: list[Any] = []
    for _ in range(total):
        wanted.append(cycle.get_last_lr()[0])
        expected.step()
        with contextlib.suppress(ValueError):
            cycle.step()
    assert np.allclose(rates, wanted), (rates, wanted)


def times(kind: str) -> int:
    """How often each example is used in an epoch."""
    return 2 if kind == "echo(loader)" else 1


def run_all(module: Any, cells: list[tuple[str, str]], results: int) -> None:
    """Run cells, each in a folder of its own, and write what comes of them to a descriptor.

    A use is a function of the framework's module: "any checkpoint" is ``any_checkpoint(kind)``.
    """
    for kind, use in cells:
        os.makedirs(f"{kind} {use}", exist_ok=True)
        os.chdir(f"{kind} {use}")
        try:
            getattr(module, use.replace("2 ", "two ").replace(" ", "_"))(kind)
            outcome = "works"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        os.write(results, (json.dumps([kind, use, outcome]) + "\n").encode())
        os.chdir("..")


def main() -> None:
    folder, framework, *cells = sys.argv[1:]
    os.chdir(folder)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    results, said = os.dup(1), os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)  # what the frameworks have to say
    os.dup2(said, 2)
    cells_of = importlib.import_module(MODULES[framework])
    run = getattr(cells_of, "in_workers", run_all)
    run(cells_of, list(zip(cells[::2], cells[1::2], strict=True)), results)
    os.close(results)
    if WORLD > 1:
        sys.stdin.read()
        # A thread of Gloo's that lets go of its last tensor while the interpreter is taken down
        # aborts the process (pytorch/pytorch#179291), and not every framework ends its groups.
        atexit._run_exitfuncs()
        os._exit(0)


if __name__ == "__main__":
    sys.modules["cells"] = sys.modules["__main__"]
    main()
