"""The cells of Accelerate; see cells.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from cells import EPOCHS, EXAMPLES, Model, check_epochs, check_ranks, check_schedule, make

import stoker

FRAMEWORK = "Accelerate"


def times(kind: str) -> int:
    return 2 if kind == "echo(loader)" else 1


class Loop:
    """A training loop as Accelerate's guides have it."""

    def __init__(self, kind: str, use: str, accumulated: int = 1) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulated,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=kind == "cached"),
        )
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        made = make(kind, FRAMEWORK, use, self.accelerator.prepare)
        self.train = made.as_dataloader() if isinstance(made, stoker.Pipeline) else made
        self.wrapped, self.optimizer, self.train = self.accelerator.prepare(
            self.model, self.optimizer, self.train
        )

    def run(self, epoch: int, batches: Any = None, stop: int | None = None) -> None:
        self.model.epoch = epoch
        for number, batch in enumerate(self.train if batches is None else batches, 1):
            with self.accelerator.accumulate(self.wrapped):
                self.accelerator.backward(self.wrapped(batch["ids"])["loss"])
                self.optimizer.step()
                self.optimizer.zero_grad()
            if number == stop:
                break


def fit(kind: str) -> None:
    loop = Loop(kind, "fit", accumulated=4)
    stepped = []
    for epoch in range(EPOCHS):
        loop.model.epoch = epoch
        for batch in loop.train:
            with loop.accelerator.accumulate(loop.wrapped):
                loop.wrapped(batch["ids"])
                stepped.append(loop.accelerator.sync_gradients)
    check_epochs(loop.model.seen, times(kind))
    batches = len(loop.train)
    assert sum(stepped) == EPOCHS * -(-batches // 4), "the tail of an epoch is a step, too"
    assert stepped[batches - 1]


def validate(kind: str) -> None:
    loop = Loop(kind, "validate")
    loop.model.eval()
    gathered = []
    for batch in loop.train:
        loop.wrapped(batch["ids"])
        gathered += loop.accelerator.gather_for_metrics(torch.as_tensor(batch["ids"])).tolist()
    assert sorted(gathered) == sorted(list(range(EXAMPLES)) * times(kind))


def resume(kind: str) -> None:
    first = Loop(kind, "resume")
    first.run(0, stop=4)
    if kind == "cached":
        first.accelerator.save_state("checkpoint")
    elif kind != "echo(loader)":
        first.accelerator.save_state("checkpoint")
        skips = Loop(kind, "resume")
        if kind == "pipeline":  # by number alone, as the guides do
            skips.run(0, skip_first_batches(skips.train, 4))
            assert len(skips.model.seen) == 2
            check_epochs(first.model.seen + skips.model.seen, times(kind), epochs=1)
    else:
        first.accelerator.save_state("checkpoint")
    rest = Loop(kind, "resume")
    rest.accelerator.load_state("checkpoint")
    rest.run(0)
    rest.run(1)
    check_epochs(first.model.seen + rest.model.seen, times(kind))


def two_processes(kind: str) -> None:
    loop = Loop(kind, "2 processes")
    for epoch in range(EPOCHS):
        loop.run(epoch)
    check_ranks(loop.model.seen, times(kind))


def schedule(kind: str) -> None:
    loop = Loop(kind, "schedule")
    total = len(loop.train) * EPOCHS
    cycle = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 1.0, total_steps=total + 1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 1.0, total_steps=total)
    cycle = loop.accelerator.prepare(cycle)
    rates = []
    for _ in range(EPOCHS):
        for batch in loop.train:
            rates.append(loop.optimizer.param_groups[0]["lr"])
            with loop.accelerator.accumulate(loop.wrapped):
                loop.accelerator.backward(loop.wrapped(batch["ids"])["loss"])
                loop.optimizer.step()
                if len(rates) < total:
                    cycle.step()
                loop.optimizer.zero_grad()
    if kind == "cached":
        assert total == len(rates) == EPOCHS * 6
    else:
        check_schedule(rates, total)


USES: dict[str, Callable[[str], None]] = {
    "fit": fit,
    "validate": validate,
    "resume": resume,
    "2 processes": two_processes,
    "schedule": schedule,
}
