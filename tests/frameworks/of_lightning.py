"""The cells of Lightning; see cells.py."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torchmetrics
from cells import (
    EPOCHS,
    EXAMPLES,
    RANK,
    WORLD,
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

import stoker

FRAMEWORK = "Lightning"


class Module(pl.LightningModule):
    def __init__(self, kind: str, use: str, train: Any = None) -> None:
        super().__init__()
        self.model = Model()
        self.kind, self.use, self.train_on = kind, use, train
        self.rates: list[float] = []
        self.total = 0

    def training_step(self, batch: Any, index: int) -> Any:
        self.model.epoch = self.current_epoch
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return self.model(batch["ids"])["loss"]

    def validation_step(self, batch: Any, index: int) -> None:
        self.model(batch["ids"])

    def train_dataloader(self) -> Any:
        return make(self.kind, FRAMEWORK, self.use) if self.train_on is None else self.train_on

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        if self.use != "schedule":
            return optimizer
        self.total = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=self.total)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class Stop(pl.Callback):
    def __init__(self, step: int | None, acknowledge: Callable[[], None] = lambda: None) -> None:
        self.step, self.acknowledge = step, acknowledge

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.acknowledge()
        if trainer.global_step == self.step:
            folder = os.environ["CELLS_SHARED"] if WORLD > 1 else ""
            trainer.save_checkpoint(os.path.join(folder, "checkpoint"))
            trainer.should_stop = True


def trainer(**settings: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**given, **settings})


def fit(kind: str) -> None:
    module = Module(kind, "fit")
    trainer().fit(module)
    check_epochs(module.model.seen, times(kind))


def validate(kind: str) -> None:
    module = Module(kind, "validate")
    trainer().validate(module, make(kind, FRAMEWORK, "validate"), verbose=False)
    assert sorted(module.model.validated) == sorted(list(range(EXAMPLES)) * times(kind))


def resume(kind: str) -> None:
    first = Module(kind, "resume")
    trainer(callbacks=[Stop(4)]).fit(first)
    assert len(first.model.seen) == 4
    rest = Module(kind, "resume")
    trainer().fit(rest, ckpt_path="checkpoint")
    check_epochs(first.model.seen + rest.model.seen, times(kind))


def two_processes(kind: str) -> None:
    module = Module(kind, "2 processes")
    trainer(devices=2, strategy="ddp").fit(module)
    check_ranks(module.model.seen, times(kind))


def schedule(kind: str) -> None:
    module = Module(kind, "schedule")
    trainer().fit(module)
    check_schedule(kind, module.rates, module.total)


# -- what is not in the matrix; the kind says which case it is


def only(train: Any, validate: Any = None, **settings: Any) -> tuple[Module, pl.Trainer]:
    """Train on something, warnings of stoker's being errors."""
    module = Module("", "")
    run = trainer(**settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*pipeline.*")
        run.fit(module, train, validate)
    return module, run


def of_epoch(module: Module, epoch: int) -> list[list[int]]:
    return [ids for at, ids in module.model.seen if at == epoch]


def limits(kind: str) -> None:
    for train in (chain().batch(8), chain().echo().batch(8), chain().batch(8).repeat().steps(5)):
        module, _ = only(train, limit_train_batches=2)
        assert len(of_epoch(module, 0)) == len(of_epoch(module, 1)) == 2
        assert of_epoch(module, 0) != of_epoch(module, 1)


def overfit(kind: str) -> None:
    for train in (chain().batch(8), chain().echo(2).batch(8), chain().batch(8).repeat().steps(5)):
        module, _ = only(train, overfit_batches=2)
        assert len(of_epoch(module, 0)) == 2
        assert of_epoch(module, 0) == of_epoch(module, 1)


def val_check_interval(kind: str) -> None:
    train = chain().echo().batch(8).repeat().steps(10)
    module, run = only(train, chain().batch(8), val_check_interval=0.2)
    assert len(module.model.validated) == EPOCHS * 5 * EXAMPLES
    assert run.global_step == EPOCHS * 10


def combined(kind: str) -> None:
    class Pair(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            for each in batch.values():
                super().training_step(each, index)
            return self.model.weight.sum()

    module = Pair("", "")
    trainer().fit(module, {"one": chain().batch(8), "two": chain().batch(8)})
    check_epochs(module.model.seen, 2)


def checkpoints(kind: str) -> None:
    def loader() -> Any:
        return torch.utils.data.DataLoader(Numbered(), 8)  # type: ignore[arg-type]

    makes: list[Callable[[], Any]] = [
        lambda: chain().echo(2).batch(8),
        lambda: chain().batch(8).echo(2),
        lambda: chain().echo().batch(8),
        lambda: chain().echo().batch(8).steps(5),
        lambda: chain().echo().batch(8).repeat().steps(5),
        lambda: stoker.echo(loader(), 2),
        lambda: stoker.echo(loader()),
        lambda: stoker.echo(loader(), 2).repeat().steps(7),  # the rest of a pass is left out
        lambda: stoker.echo(loader()).repeat().steps(7),
    ]
    for number, make_it in enumerate(makes):
        first, run = only(make_it(), enable_checkpointing=True, default_root_dir=str(number))
        callback: Any = run.checkpoint_callback
        rest = Module("", "")
        trainer(max_epochs=3).fit(rest, make_it(), ckpt_path=callback.best_model_path)
        assert {at for at, _ in rest.model.seen} == {2}, number
        steps = [len(of_epoch(each, at)) for each, at in ((first, 0), (first, 1), (rest, 2))]
        assert min(steps) >= 5, (number, steps)


def estimated(kind: str) -> None:
    """Resume where loaders are set up before the checkpoint is read."""

    class Estimating(Module):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    makes: list[Callable[[], Any]] = [
        lambda: chain().batch(8),
        lambda: chain().batch(8).as_dataloader(),
        lambda: chain().echo(2).batch(8).repeat().steps(9),
    ]
    for number, make_it in enumerate(makes):
        whole = Estimating("", "")
        trainer().fit(whole, make_it())
        for stop in (4, len(of_epoch(whole, 0))):  # in an epoch, and at its end
            first, rest = Estimating("", ""), Estimating("", "")
            trainer(callbacks=[Stop(stop)]).fit(first, make_it())
            trainer().fit(rest, make_it(), ckpt_path="checkpoint")
            seen = [ids for _, ids in first.model.seen[:stop] + rest.model.seen]
            assert seen == [ids for _, ids in whole.model.seen], (number, stop)


class Save(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(f"epoch-{trainer.current_epoch}")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint("in the step")


class Failing(Module):
    """Fails behind so many batches; of a CombinedLoader it takes all."""

    def __init__(self, fails_at: int | None) -> None:
        super().__init__("", "")
        self.fails_at = fails_at

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if len(self.model.seen) == self.fails_at:
            raise ZeroDivisionError

    def training_step(self, batch: Any, index: int) -> Any:
        if isinstance(batch, list):
            batch = {"ids": torch.cat([each["ids"] for each in batch])}
        return super().training_step(batch, index)


def any_checkpoint(kind: str) -> None:
    """Resume from each epoch's end, and from the middle of one, as if nothing had stopped."""

    def seen(
        train: Any, checkpoint: str | None = None, fails_at: int | None = None, **limits: Any
    ) -> Any:
        module = Failing(fails_at)
        with contextlib.suppress(ZeroDivisionError):
            run = trainer(max_epochs=3, callbacks=[Save()], **limits)
            run.fit(module, train, ckpt_path=checkpoint)
        return module.model.seen

    def rounds() -> Any:
        return chain().batch(8).repeat().steps(4)

    makes: list[Callable[[], Any]] = [
        lambda: chain().batch(8),
        lambda: chain().batch(8).as_dataloader(),
        rounds,
        lambda: pl.utilities.CombinedLoader([chain().batch(8), rounds()]),
    ]
    for number, make_it in enumerate(makes):
        for limit in (1.0, 3):
            whole = seen(make_it(), limit_train_batches=limit)
            for last in range(3):
                rest = seen(make_it(), f"epoch-{last}", limit_train_batches=limit)
                assert rest == [each for each in whole if each[0] > last], (number, limit, last)
        whole = seen(make_it())
        for fails_at in (2, 5):
            first = seen(make_it(), fails_at=fails_at)
            assert len(first) == fails_at
            assert first + seen(make_it(), "in the step") == whole, (number, fails_at)


def acknowledged(kind: str) -> None:
    """Resume where the length is unknown: Lightning then reads a batch ahead."""
    train, again = chain().echo().batch(8), chain().echo().batch(8)
    first, _ = only(train, callbacks=[Stop(3, train.acknowledge)])
    rest = Module("", "")
    trainer(callbacks=[Stop(None, again.acknowledge)]).fit(rest, again, ckpt_path="checkpoint")
    assert len(first.model.seen) == 3
    assert again.epoch == EPOCHS
    for epoch in range(EPOCHS):
        batches = of_epoch(first, epoch) + of_epoch(rest, epoch)
        assert {i for ids in batches for i in ids} == set(range(EXAMPLES))
    said = ""
    try:
        only(chain().echo().batch(8), callbacks=[Stop(3)])
    except stoker.StateError as error:
        said = str(error)
    assert "Lightning reads a batch ahead" in said
    assert "pipeline.acknowledge()" in said


def fresh_clock(kind: str) -> None:
    train = chain().echo(2).batch(8)

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1.0)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * 6)
            self.schedule = stoker.lr_schedule(cosine, train)
            return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    module = Scheduled("", "")
    trainer().fit(module, train)
    assert len(module.model.seen) == EPOCHS * 12
    assert module.schedule.scheduler.last_epoch == EPOCHS * 6


def unsharded(kind: str) -> None:
    made: Any = undivided(kind)
    trainer(devices=2, strategy="ddp").fit(Module("", ""), made)


def resumed_ranks(kind: str) -> None:
    """Stop two processes in the middle of an epoch; one state serves both."""
    first = Module("pipeline", "2 processes")
    trainer(devices=2, strategy="ddp", callbacks=[Stop(2)]).fit(first)
    torch.distributed.barrier()
    os.chdir(os.environ["CELLS_SHARED"])
    rest = Module("pipeline", "2 processes")
    trainer(devices=2, strategy="ddp").fit(rest, ckpt_path="checkpoint")
    check_ranks(first.model.seen + rest.model.seen, 1)


class Evaluated(Module):
    """Counts with torchmetrics what is no padding."""

    def __init__(self) -> None:
        super().__init__("pipeline", "2 processes")
        self.right = torchmetrics.classification.MulticlassAccuracy(20, average="micro")
        self.loss = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, index: int) -> None:
        ids, valid = batch["ids"], batch["valid"]
        logits = torch.nn.functional.one_hot(ids - ids % 2, 20).float()  # even ones are right
        if valid.any():  # torchmetrics takes no empty batches
            self.right.update(logits[valid], ids[valid])
            self.loss.update(ids[valid].float())
        self.log("right", self.right)
        self.log("loss", self.loss)

    test_step = validation_step


def padded_ranks(kind: str) -> None:
    """Two processes report what one that has all the data would."""
    for examples, batch in ((11, 4), (11, 2), (1, 4), (16, 4), (17, 4), (3, 4), (9, 4)):
        for use in ("validate", "test"):
            run = trainer(devices=2, strategy="ddp")
            held_out = stoker.from_dataset(Numbered(examples), seed=0)
            held_out = held_out.shard(rank=RANK, world_size=WORLD, mask="valid", remainder="pad")
            told = getattr(run, use)(Evaluated(), held_out.batch(batch).to_torch(), verbose=False)
            ids = np.arange(examples)
            assert np.isclose(told[0]["right"], (ids % 2 == 0).mean()), (examples, batch, told)
            assert np.isclose(told[0]["loss"], ids.mean()), (examples, batch, told)
