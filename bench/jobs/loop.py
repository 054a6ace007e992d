"""The training loop of the jobs: a small network on the host, and an emulated accelerator."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


def options(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Read what all jobs are told, beside options of their own."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device-ms", type=float, default=0.0, help="of a step, elsewhere")
    parser.add_argument("--log", type=Path, help="for the times of all steps")
    return parser.parse_args()


def train(dataset: Any, model: nn.Module, given: argparse.Namespace, moved: Any = None) -> None:
    """Train; every step also waits for a device that computes for ``--device-ms``.

    ``moved`` transforms each batch, if given.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(
        dataset, given.batch, shuffle=True, num_workers=given.workers, drop_last=True
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    times = []
    for _ in range(given.epochs):
        for inputs, labels in loader:
            if moved is not None:
                inputs = moved(inputs)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            time.sleep(given.device_ms / 1e3)
            times.append(time.perf_counter())
    if given.log:
        given.log.write_text(json.dumps(times))
