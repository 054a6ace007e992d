"""The cells of Accelerate; see cells.py."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from cells import (
    EPOCHS,
    EXAMPLES,
    Model,
    Numbered,
    chain,
    check_epochs,
    check_ranks,
    check_schedule,
    make,
    times,
    undivided,
)
from torch.utils.data import DataLoader

import stoker

FRAMEWORK = "Accelerate"


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
    first.accelerator.save_state("checkpoint")
    if kind == "pipeline":  # by number alone, as the guides do
        skips = Loop(kind, "resume")
        skips.run(0, skip_first_batches(skips.train, 4))
        assert len(skips.model.seen) == 2
        check_epochs(first.model.seen + skips.model.seen, times(kind), epochs=1)
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
    cycle: Any = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 1.0, total_steps=total)
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
    check_schedule(kind, rates, total)


# -- what is not in the matrix


def accumulate(kind: str) -> None:
    """Count the optimizer steps over what is not prepared, and where only the end tells."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    prepared = accelerator.prepare(DataLoader(Numbered(), 8))  # type: ignore[arg-type]
    cases: dict[str, Any] = {
        "bare": chain().batch(8),
        "filtered": chain().filter(lambda x: x["ids"] % 3 > 0).batch(8),
        "auto": chain().echo().batch(8),
        "rounds": chain().batch(8).repeat().steps(7),
        "echo": stoker.echo(DataLoader(Numbered(), 8), 2),  # type: ignore[arg-type]
        "echo(prepared)": stoker.echo(prepared, 2),
        "auto(prepared)": stoker.echo(prepared),
    }
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for name, train in cases.items():
        for _ in range(2):
            stepped = []
            for _batch in accelerator.prepare(train):
                for _other in chain().batch(24):  # a loop inside, as for validation
                    pass
                with accelerator.accumulate(model):
                    stepped.append(accelerator.sync_gradients)
            wanted = [number % 4 == 0 for number in range(1, len(stepped))] + [True]
            assert stepped == wanted, (name, stepped)
    assert not accelerator.gradient_state.in_dataloader


def lookahead(kind: str) -> None:
    """A state is that of the batch at hand, though the next one was looked for."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(torch.nn.Linear(1, 1))

    def build() -> Any:
        return chain().filter(lambda x: x["ids"] % 3 > 0).batch(8)

    whole = [batch["ids"].tolist() for batch in build()]
    train = build()
    for number, _ in enumerate(train):
        with accelerator.accumulate(model):
            resumed = build()
            resumed.load_state_dict(train.state_dict())
            with resumed_quietly(resumed) as rest:
                assert [batch["ids"].tolist() for batch in rest] == whole[number + 1 :]
        if number == len(whole) - 2:
            break


@contextlib.contextmanager
def resumed_quietly(pipeline: Any) -> Any:
    with iter(pipeline) as batches:
        yield batches


def skips(kind: str) -> None:
    whole = [batch["ids"].tolist() for batch in chain().batch(8)]
    rest = skip_first_batches(chain().batch(8).as_dataloader(), 4)
    assert [batch["ids"].tolist() for batch in rest] == whole[4:]
    echoed = stoker.echo(DataLoader(Numbered(), 8), 2, seed=0)  # type: ignore[arg-type]
    everything = [batch["ids"].tolist() for batch in echoed]
    echoed.set_epoch(0)
    rest = skip_first_batches(echoed.as_dataloader(), 5)
    assert [batch["ids"].tolist() for batch in rest] == everything[5:]
    with pytest.raises(AttributeError, match="as_dataloader"):
        skip_first_batches(echoed, 5)


def unsharded(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(undivided(kind).as_dataloader()):
        pass


def resumed_ranks(kind: str) -> None:
    """Stop two processes in the middle of an epoch; each has its state."""
    shared = os.environ["CELLS_SHARED"]
    first = Loop("pipeline", "2 processes")
    first.run(0, stop=2)
    first.accelerator.save_state(os.path.join(shared, "checkpoint"))
    first.accelerator.wait_for_everyone()
    rest = Loop("pipeline", "2 processes")
    rest.accelerator.load_state(os.path.join(shared, "checkpoint"))
    rest.run(0)
    rest.run(1)
    check_ranks(first.model.seen + rest.model.seen, 1)


SIZES = [(11, 4), (11, 2), (1, 4), (16, 4), (17, 4), (3, 4), (9, 4)]


def padded_ranks(kind: str) -> None:
    """What two processes gather for metrics is the data, in its order, each example once."""
    for even in (True, False):  # of Accelerate's own loaders; a pipeline's batches are ready made
        given = DataLoaderConfiguration(even_batches=even)
        accelerator = Accelerator(cpu=True, dataloader_config=given)
        for examples, batch in SIZES:
            for pad in ("pad", "pad_full"):
                held_out = stoker.from_arrays(np.arange(examples), seed=0)
                held_out = held_out.shard(mask="valid", remainder=pad).batch(batch).to_torch()
                for loader in (held_out, accelerator.prepare(held_out.as_dataloader())):
                    check_gathered(accelerator, loader, examples)
                held_out.set_epoch(0)
                behind = skip_first_batches(held_out.as_dataloader(), 1)
                check_gathered(accelerator, behind, examples, start=2 * batch)


def check_gathered(accelerator: Accelerator, batches: Any, examples: int, start: int = 0) -> None:
    numbers, texts, valid = [], [], []
    for ids, mask in batches:
        both = accelerator.gather_for_metrics((ids, mask))
        numbers += both[0].tolist()
        valid += both[1].tolist()
        texts += accelerator.gather_for_metrics([str(i) for i in ids.tolist()])
    assert numbers == list(range(start, examples))
    assert texts == [str(number) for number in numbers]
    assert all(valid)


def uneven_ranks(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    for examples in (10, 11):
        uneven = stoker.from_arrays(np.arange(examples), seed=0).shard(remainder="uneven").batch(4)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            list(uneven)
        said = [str(each.message) for each in told]
        assert ("remainder='pad'" in " ".join(said)) == (examples == 11), said
    accelerator.wait_for_everyone()  # rank 0 keeps the store that the other ranks still read
