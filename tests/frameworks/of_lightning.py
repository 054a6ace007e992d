"""The cells of Lightning; see cells.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from cells import EPOCHS, EXAMPLES, Model, check_epochs, check_ranks, check_schedule, make

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
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint("checkpoint")
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


def times(kind: str) -> int:
    return 2 if kind == "echo(loader)" else 1


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
    if kind == "cached":  # a DataLoader: its own length
        assert module.total == len(module.rates) == EPOCHS * 6
    else:
        check_schedule(module.rates, module.total)


USES: dict[str, Callable[[str], None]] = {
    "fit": fit,
    "validate": validate,
    "resume": resume,
    "2 processes": two_processes,
    "schedule": schedule,
}
