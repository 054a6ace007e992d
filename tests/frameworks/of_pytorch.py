"""The cells of a loop of one's own in PyTorch; see cells.py."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cells import (
    EPOCHS,
    EXAMPLES,
    WORLD,
    Model,
    Numbered,
    Seen,
    chain,
    check_epochs,
    check_ranks,
    check_schedule,
    make,
    times,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stoker


class Loop:
    """A training loop.

    Args:
        train: what it trains on.
        wrap: what the model is wrapped in.
    """

    def __init__(self, train: Any, wrap: Callable[[Any], Any] = lambda model: model) -> None:
        self.train = train
        self.model = Model()
        self.wrapped = wrap(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.rates: list[float] = []
        self.after: Callable[[], None] = lambda: None

    def run(self, epoch: int, stop: int | None = None) -> None:
        self.model.epoch = epoch
        for number, batch in enumerate(self.train, 1):
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.wrapped(batch["ids"])["loss"].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.after()
            if number == stop:
                break

    def fit(self, kind: str) -> None:
        for epoch in range(EPOCHS):
            self.run(epoch)
        check_epochs(self.model.seen, times(kind))

    def validate(self, kind: str) -> None:
        self.model.eval()
        with torch.inference_mode():
            for batch in self.train:
                self.wrapped(batch["ids"])
        assert sorted(self.model.validated) == sorted(list(range(EXAMPLES)) * times(kind))

    def two_processes(self, kind: str) -> None:
        for epoch in range(EPOCHS):
            self.run(epoch)
        check_ranks(self.model.seen, times(kind))

    def schedule(self, kind: str) -> None:
        total = len(self.train) * EPOCHS
        cycle = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1.0, total_steps=total)

        def step() -> None:
            if len(self.rates) < total:
                cycle.step()

        self.after = step
        for epoch in range(EPOCHS):
            self.run(epoch)
        check_schedule(kind, self.rates, total)


def loop(kind: str, use: str) -> Loop:
    return Loop(make(kind, "PyTorch", use))


def fit(kind: str) -> None:
    loop(kind, "fit").fit(kind)


def validate(kind: str) -> None:
    loop(kind, "validate").validate(kind)


def schedule(kind: str) -> None:
    loop(kind, "schedule").schedule(kind)


def resume(kind: str) -> None:
    first = loop(kind, "resume")
    first.run(0, stop=4)
    torch.save(first.train.state_dict(), "checkpoint")
    rest = loop(kind, "resume")
    rest.train.load_state_dict(torch.load("checkpoint", weights_only=False))
    rest.run(0)
    rest.run(1)
    check_epochs(first.model.seen + rest.model.seen, times(kind))


def grouped(cell: Callable[[str], None]) -> Callable[[str], None]:
    """Run a cell in a process group, if there are several ranks.

    All cells of a process have the same: a rank that begins another one may reach the store of the
    one before, which ends.
    """

    @functools.wraps(cell)
    def run(kind: str) -> None:
        if WORLD > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
            atexit.register(torch.distributed.destroy_process_group)
        return cell(kind)

    return run


@grouped
def two_processes(kind: str) -> None:
    Loop(make(kind, "PyTorch", "2 processes"), DistributedDataParallel).two_processes(kind)


# -- what is not in the matrix


def compiled(kind: str) -> None:
    """A compiled step sees what the loop sees, and is compiled once."""

    def step(weight: Any, x: Any) -> Any:
        return (weight * x.float()).tanh().sum()

    def losses(step: Any) -> list[float]:
        weight = torch.ones((), requires_grad=True)
        found = []
        for x in stoker.from_dataset(Numbered(), seed=0).shuffle().echo(2).batch(8).to_torch():
            loss = step(weight, x["ids"])
            loss.backward()
            found.append(float(loss.detach()))
        return [*found, float(weight.grad)]  # type: ignore[arg-type]

    plain = losses(step)
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert losses(torch.compile(step, backend="aot_eager", fullgraph=True)) == plain
    assert counters["stats"]["unique_graphs"] == 1


def folder(name: str) -> Path:
    return Path(os.environ["CELLS_SHARED"], name)


def ids(batches: Any) -> list[list[int]]:
    return [batch["ids"].tolist() for batch in batches]


@grouped
def resumed_ranks(kind: str) -> None:
    """Save and load distributed checkpoints in the middle of an epoch."""
    first = Loop(chain().shard().echo(2).batch(8))
    first.run(0, stop=3)
    dcp.save({"loader": first.train}, checkpoint_id=folder("two"))
    rest = Loop(chain().shard().echo(2).batch(8))
    dcp.load({"loader": rest.train}, checkpoint_id=folder("two"))
    rest.run(0)
    rest.run(1)
    check_ranks(first.model.seen + rest.model.seen, 2)

    def filtered() -> stoker.Pipeline[Any]:
        return chain().shard().filter(lambda x: x["ids"] % 5 > 1).batch(2).repeat().steps(7)

    plain = filtered()
    whole = ids(plain) + ids(plain)
    saved, resumed = filtered(), filtered()
    begun = [batch for _, batch in zip(range(4), ids_of(saved), strict=False)]
    saving: Any = dcp.async_save({"loader": saved}, checkpoint_id=folder("filtered"))
    saving.result()
    dcp.load({"loader": resumed}, checkpoint_id=folder("filtered"))
    assert begun + ids(resumed) + ids(resumed) == whole
    states: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(states, saved.state_dict())
    assert states[0] != states[1]


def ids_of(batches: Any) -> Any:
    return (batch["ids"].tolist() for batch in batches)


@grouped
def other_world(kind: str) -> None:
    """What one rank has saved, two load; they run after it."""
    train = chain().shard().batch(16 // WORLD)
    if WORLD == 1:
        Loop(train).run(0, stop=2)
        dcp.save({"loader": train}, checkpoint_id=folder("one"))
    else:
        dcp.load({"loader": train}, checkpoint_id=folder("one"))
        assert train.counts.steps == 2
        assert len(ids(train)) == EXAMPLES // 16 - 2


@grouped
def sharded_model(kind: str) -> None:
    """FSDP on CPUs: each rank's part of the data, the model and its checkpoint."""
    mesh = init_device_mesh("cpu", (WORLD,))

    def made() -> tuple[Any, Any, stoker.Pipeline[Any]]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        model = torch.nn.Sequential(*layers)
        for part in (layers[0], layers[2], model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return model, optimizer, chain().shard().echo(2).batch(8).to_torch()

    def run(of: Any, epoch: int, stop: int | None = None) -> Seen:
        model, optimizer, train = of
        seen: Seen = []
        for number, batch in enumerate(train, 1):
            seen.append((epoch, batch["ids"].tolist()))
            model(batch["ids"][:, None].float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == stop:
                break
        return seen

    def state(of: Any) -> dict[str, Any]:
        return {"model": of[0].state_dict(), "loader": of[2]}

    first = made()
    seen = run(first, 0, stop=4)
    dcp.save(state(first), checkpoint_id=folder("sharded"))
    rest = made()
    loaded = state(rest)
    dcp.load(loaded, checkpoint_id=folder("sharded"))
    rest[0].load_state_dict(loaded["model"])
    for mine, theirs in zip(rest[0].parameters(), first[0].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    check_ranks(seen + run(rest, 0) + run(rest, 1), 2)
