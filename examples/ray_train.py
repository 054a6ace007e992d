"""Ray Train on one machine: two workers train, one is lost, and training goes on where it was.

pip install 'stoker[ray,torch]' 'ray[train]'
python examples/ray_train.py
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import stoker

EXAMPLES, EPOCHS, SAVE_EVERY = 512, 3, 4


def make_pipeline() -> stoker.Pipeline:
    inputs = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype(np.float32)
    targets = inputs @ np.arange(1, 5, dtype=np.float32)
    source = stoker.from_arrays(np.arange(EXAMPLES), inputs, targets, seed=0)
    return source.shuffle().shard().batch(16).to_torch()  # .shard() asks Ray which rank this is


def train(settings: dict[str, Any]) -> None:
    """Train as one of the workers; called by each of them, again if one was lost."""
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = make_pipeline()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"))
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            batches.load_state_dict(json.loads(Path(folder, "data.json").read_text()))
    step = batches.counts.steps
    while batches.epoch < EPOCHS:
        for numbers, inputs, targets in batches:
            loss = torch.nn.functional.mse_loss(model(inputs)[:, 0], targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            note(settings, step, numbers.tolist())
            if step % SAVE_EVERY == 0:
                report(model, optimizer, batches, float(loss))


def report(model: Any, optimizer: Any, batches: stoker.Pipeline, loss: float) -> None:
    """Have Ray keep a checkpoint: the state of one rank is that of all."""
    with tempfile.TemporaryDirectory() as folder:
        saved = None
        if ray.train.get_context().get_world_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(folder, "model.pt"))
            Path(folder, "data.json").write_text(json.dumps(batches.state_dict()))
            saved = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss}, checkpoint=saved)


def note(settings: dict[str, Any], step: int, numbers: list[int]) -> None:
    """Write down what was trained on; and lose a worker, once, to see what comes of it."""
    rank = ray.train.get_context().get_world_rank()
    with Path(settings["folder"], f"rank{rank}.jsonl").open("a") as log:
        print(json.dumps([step, numbers]), file=log)
    lost = Path(settings["folder"], "lost")
    if step == settings["lose_at"] and rank == 1 and not lost.exists():
        lost.touch()
        os.kill(os.getpid(), 9)


def main(folder: str) -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "lose_at": 22},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=folder, name="run", failure_config=FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"loss {result.metrics['loss']:.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
