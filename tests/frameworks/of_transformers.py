"""The cells of Hugging Face's Trainer; see cells.py."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from cells import (
    EPOCHS,
    EXAMPLES,
    Model,
    Numbered,
    check_epochs,
    check_ranks,
    check_schedule,
    make,
    times,
    undivided,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

import stoker
from stoker.transformers import SavePipeline

FRAMEWORK = "Hugging Face Trainer"


EVALUATED: Any = torch.utils.data.TensorDataset(torch.arange(EXAMPLES))


class Stop(TrainerCallback):
    """Ends the run behind a step, with a checkpoint."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class OnPipeline(Trainer):
    """As documented: three lines; and what these tests look at."""

    made: Any
    rates: list[float]

    def get_train_dataloader(self) -> Any:
        made = self.made
        return self.accelerator.prepare(
            made.as_dataloader() if isinstance(made, stoker.Pipeline) else made
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.get_train_dataloader()

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **given: Any) -> Any:
        within: Any = getattr(model, "module", model)
        within.epoch = int(self.state.epoch or 0)
        if self.is_in_train:
            optimizer: Any = self.optimizer
            self.rates.append(optimizer.param_groups[0]["lr"])
        return super().compute_loss(model, inputs, *rest, **given)


def trainer(kind: str, use: str, stop: int | None = None, **settings: Any) -> Any:
    arguments = TrainingArguments(
        **{
            "output_dir": "out",
            "num_train_epochs": EPOCHS,
            "use_cpu": True,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "logging_strategy": "no",
            "remove_unused_columns": False,
            "learning_rate": 0.1,
            **settings,
        }
    )
    model = Model()
    made = OnPipeline(model=model, args=arguments, callbacks=[Stop(stop)], eval_dataset=EVALUATED)
    made.made = make(kind, FRAMEWORK, use, made.accelerator.prepare)
    made.rates = []
    if isinstance(made.made, stoker.Pipeline):
        made.add_callback(SavePipeline())
    return made


def fit(kind: str) -> None:
    run = trainer(kind, "fit", gradient_accumulation_steps=4)
    run.train()
    check_epochs(run.model.seen, times(kind))
    assert run.state.global_step == EPOCHS * -(-6 * times(kind) // 4)


def validate(kind: str) -> None:
    run = trainer(kind, "validate")
    run.evaluate()
    assert sorted(run.model.validated) == sorted(list(range(EXAMPLES)) * times(kind))


def resume(kind: str) -> None:
    first = trainer(kind, "resume", 4)
    first.train()
    assert len(first.model.seen) == 4
    rest = trainer(kind, "resume")
    rest.train(resume_from_checkpoint="out/checkpoint-4")
    check_epochs(first.model.seen + rest.model.seen, times(kind))
    if kind == "pipeline":  # by number alone
        counted = trainer(kind, "resume")
        counted.remove_callback(SavePipeline)
        counted.train(resume_from_checkpoint="out/checkpoint-4")
        assert counted.model.seen == rest.model.seen


def two_processes(kind: str) -> None:
    run = trainer(kind, "2 processes")
    run.train()
    check_ranks(run.model.seen, times(kind))


def schedule(kind: str) -> None:
    run = trainer(kind, "schedule")
    steps = EPOCHS * 6 if kind == "cached" else EPOCHS * 10
    run.create_optimizer()
    run.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 1.0, total_steps=steps)
    bounded(run.lr_scheduler)
    run.train()
    assert run.state.max_steps == run.state.global_step == steps
    check_schedule(kind, run.rates, steps)


def bounded(cycle: Any) -> None:
    """Have no step follow the last: OneCycleLR raises there, and the Trainer takes one."""
    step = cycle.step

    def step_if_any() -> None:
        with contextlib.suppress(ValueError):
            step()

    cycle.step = step_if_any


# -- what is not in the matrix


def at_epoch_ends(kind: str) -> None:
    first = trainer("pipeline", "fit", save_strategy="epoch", num_train_epochs=1)
    first.train()
    rest = trainer("pipeline", "fit")
    rest.train(resume_from_checkpoint="out/checkpoint-6")
    check_epochs(first.model.seen + rest.model.seen, 1)


def auto(kind: str) -> None:
    """In the middle of an epoch that follows the stall: no fresh example is lost or read twice."""
    first = trainer("pipeline", "schedule", 7)
    first.train()
    rest = trainer("pipeline", "schedule")
    rest.train(resume_from_checkpoint="out/checkpoint-7")
    steps = len(first.model.seen) + len(rest.model.seen)
    assert steps == rest.state.global_step == 2 * 10
    clock = rest.made.counts
    assert clock.steps == steps
    assert clock.fresh_examples >= EXAMPLES
    assert {i for _, ids in first.model.seen + rest.model.seen for i in ids} == set(range(EXAMPLES))


def evaluates(run: Any, use: str = "validate") -> Any:
    """Have a trainer evaluate on a pipeline, as documented."""
    run.get_eval_dataloader = lambda *_: run.accelerator.prepare(
        make("pipeline", FRAMEWORK, use).as_dataloader()
    )
    return run


def while_training(kind: str) -> None:
    run = evaluates(trainer("pipeline", "fit", eval_strategy="steps", eval_steps=2))
    run.train()
    check_epochs(run.model.seen, 1)
    assert sorted(run.model.validated) == sorted(list(range(EXAMPLES)) * 6)


def resume_with_evaluation(kind: str) -> None:
    """Evaluation stands between the steps, before the checkpoint and behind it."""
    told: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    first = evaluates(trainer("pipeline", "fit", 4, **told))
    first.train()
    rest = evaluates(trainer("pipeline", "fit", **told))
    rest.train(resume_from_checkpoint="out/checkpoint-4")
    check_epochs(first.model.seen + rest.model.seen, 1)
    assert sorted(first.model.validated) == sorted(list(range(EXAMPLES)) * 2)
    assert sorted(rest.model.validated) == sorted(list(range(EXAMPLES)) * 4)
    rest.evaluate()
    assert sorted(rest.model.validated) == sorted(list(range(EXAMPLES)) * 5)


def refused(kind: str) -> None:
    run = trainer("cached", "fit")
    run.add_callback(SavePipeline())
    cases = {"found no pipeline": run}
    lengthless = trainer("pipeline", "fit", max_steps=4)
    lengthless.made = stoker.from_dataset(Numbered(), seed=0).echo().batch(8)
    cases["counts epochs by batches"] = lengthless
    for text, each in cases.items():
        with pytest.raises(ValueError, match=text):
            each.train()


def unsharded(kind: str) -> None:
    run = trainer("pipeline", "fit")
    run.made = undivided(kind)
    run.train()


def resumed_ranks(kind: str) -> None:
    """Stop two processes in the middle of an epoch; one state serves both."""
    out = os.path.join(os.environ["CELLS_SHARED"], "out")
    told: dict[str, Any] = {"output_dir": out, "eval_strategy": "steps", "eval_steps": 1}
    first = evaluates(trainer("pipeline", "2 processes", 2, **told), "2 processes")
    first.train()
    rest = evaluates(trainer("pipeline", "2 processes", **told), "2 processes")
    rest.train(resume_from_checkpoint=f"{out}/checkpoint-2")
    check_ranks(first.model.seen + rest.model.seen, 1)
    assert len(rest.model.validated) == 4 * EXAMPLES // 2
