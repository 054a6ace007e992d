"""The cells of Ray Train; see cells.py. What trains runs in Ray's workers."""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import cells
import ray
import ray.train
import torch
from cells import check_epochs, make, times, undivided
from of_pytorch import Loop
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

import stoker


def loop(kind: str, use: str) -> Loop:
    made = make(
        kind, "Ray Train", use, functools.partial(prepare_data_loader, move_to_device=False)
    )
    if not isinstance(made, stoker.Pipeline) and use != "resume":
        made = prepare_data_loader(made)
    return Loop(made, prepare_model)


def fit(kind: str) -> None:
    loop(kind, "fit").fit(kind)


def validate(kind: str) -> None:
    loop(kind, "validate").validate(kind)


def schedule(kind: str) -> None:
    loop(kind, "schedule").schedule(kind)


def two_processes(kind: str) -> None:
    loop(kind, "2 processes").two_processes(kind)


def resume(kind: str) -> None:
    """Lose the worker behind a checkpoint in the middle of an epoch."""
    work, checkpoint = loop(kind, "resume"), ray.train.get_checkpoint()
    saved: dict[str, Any] = {}
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state"), weights_only=False)
    if saved.get("kind") != kind:  # another cell's, or none
        assert not Path("lost").exists()
        work.run(0, stop=4)
        with tempfile.TemporaryDirectory() as folder:
            state = {"kind": kind, "loader": work.train.state_dict(), "seen": work.model.seen}
            torch.save(state, Path(folder, "state"))
            ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))
        ray.train.get_all_reported_checkpoints()  # waits until it is known
        Path("lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    assert len(saved["seen"]) == 4
    work.train.load_state_dict(saved["loader"])
    work.run(0)
    work.run(1)
    check_epochs(saved["seen"] + work.model.seen, times(kind))


def unsharded(kind: str) -> None:
    Loop(undivided(kind)).run(0)


def work(settings: dict[str, Any]) -> None:
    """Be one of the workers; after a loss go on with the cell that it was lost in."""
    context, folder = ray.train.get_context(), settings["folder"]
    cells.RANK, cells.WORLD = context.get_world_rank(), context.get_world_size()
    outcomes = Path(folder, f"outcomes-{cells.RANK}")
    outcomes.touch()
    done = len(outcomes.read_text().splitlines())
    os.chdir(folder)
    with outcomes.open("ab") as results:
        cells.run_all(sys.modules[__name__], settings["cells"][done:], results.fileno())


def in_workers(_: Any, wanted: list[tuple[str, str]], results: int) -> None:
    """Run cells under Ray Train, in one worker or in two."""
    ray.init(
        num_cpus=3, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False
    )
    for workers in (1, 2):
        here = Path(f"workers-{workers}").absolute()
        here.mkdir()
        own = [cell for cell in wanted if (cell[1] in ("2 processes", "unsharded")) == workers - 1]
        losses = sum(use == "resume" for _, use in own)
        TorchTrainer(
            work,
            train_loop_config={"cells": own, "folder": str(here)},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                storage_path=str(here),
                name="run",
                failure_config=FailureConfig(max_failures=losses),
            ),
        ).fit()
        of_ranks = [(here / f"outcomes-{rank}").read_bytes() for rank in range(workers)]
        assert all(each == of_ranks[0] for each in of_ranks), of_ranks
        os.write(results, of_ranks[0])
    ray.shutdown()
