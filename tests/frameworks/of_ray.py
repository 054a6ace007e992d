"""The cells of Ray Train; see cells.py. What trains runs in Ray's workers."""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
import ray
import ray.train
import torch
from cells import Numbered, check_epochs, make
from of_pytorch import Loop, chain, times
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

import stoker


def loop(kind: str, use: str) -> Loop:
    made = make(kind, "Ray Train", use, functools.partial(prepare_data_loader, move_to_device=False))
    if not isinstance(made, stoker.Pipeline) and use != "resume":
        made = prepare_data_loader(made)
    return Loop(made, prepare_model)


def resume(kind: str) -> None:
    """Lose the worker behind a checkpoint in the middle of an epoch."""
    work, checkpoint = loop(kind, "resume"), ray.train.get_checkpoint()
    if checkpoint is None:
        work.run(0, stop=4)
        with tempfile.TemporaryDirectory() as folder:
            state = {"loader": work.train.state_dict(), "seen": work.model.seen}
            torch.save(state, Path(folder, "state"))
            ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))
        assert ray.train.get_all_reported_checkpoints()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state"), weights_only=False)
        assert len(saved["seen"]) == 4
        work.train.load_state_dict(saved["loader"])
        work.run(0)
        work.run(1)
        check_epochs(saved["seen"] + work.model.seen, times(kind))


def unsharded(kind: str) -> None:
    made: Any = chain().batch(8)
    if kind == "echo(loader)":
        made = stoker.echo(torch.utils.data.DataLoader(Numbered(), 8), 2)  # type: ignore[arg-type]
    Loop(made).run(0)


WITHIN: dict[str, Callable[[str], None]] = {
    "fit": lambda kind: loop(kind, "fit").fit(kind),
    "validate": lambda kind: loop(kind, "validate").validate(kind),
    "resume": resume,
    "2 processes": lambda kind: loop(kind, "2 processes").two_processes(kind),
    "schedule": lambda kind: loop(kind, "schedule").schedule(kind),
    "unsharded": unsharded,
}


def work(settings: dict[str, str]) -> None:
    """Be one of the workers of a cell; the first of them notes an error."""
    context = ray.train.get_context()
    cells.RANK, cells.WORLD = context.get_world_rank(), context.get_world_size()
    try:
        WITHIN[settings["use"]](settings["kind"])
    except Exception as error:
        if cells.RANK == 0:
            told = [type(error).__name__, str(error)]
            Path(settings["folder"], "error").write_text(json.dumps(told))


def in_workers(use: str, kind: str) -> None:
    """Run a cell under Ray Train."""
    if not ray.is_initialized():
        ray.init(
            num_cpus=3, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False
        )
    here = os.getcwd()
    TorchTrainer(
        work,
        train_loop_config={"use": use, "kind": kind, "folder": here},
        scaling_config=ScalingConfig(num_workers=2 if use in ("2 processes", "unsharded") else 1),
        run_config=RunConfig(
            storage_path=here,
            name="run",
            failure_config=FailureConfig(max_failures=1 if use == "resume" else 0),
        ),
    ).fit()
    error = Path("error")
    if error.exists():
        kind_of_error, text = json.loads(error.read_text())
        raise {"StateError": stoker.StateError, "ValueError": ValueError}.get(
            kind_of_error, AssertionError
        )(text)


def cell(use: str) -> Callable[[str], None]:
    return functools.partial(in_workers, use)


USES = {use: cell(use) for use in ("fit", "validate", "resume", "2 processes", "schedule")}
MORE = {"unsharded": cell("unsharded")}
