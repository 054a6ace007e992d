"""What the examples train: a small network, on pictures that take 4 ms each to prepare."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

import stoker

PICTURES = 1_024
CLASSES = 4
BATCH = 64


class Pictures:
    """Grey pictures of 32 x 32 with a bright quarter: which one is the label."""

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        label = index % CLASSES
        picture = np.random.default_rng(index).normal(size=(1, 32, 32)).astype(np.float32)
        top, left = divmod(label, 2)
        picture[0, top * 16 : top * 16 + 16, left * 16 : left * 16 + 16] += 0.3
        time.sleep(0.004)  # as a real decoder would take
        return picture, label


def flipped(example: tuple[Any, int], rng: np.random.Generator) -> tuple[Any, int]:
    """Add noise, anew in every epoch."""
    picture, label = example
    noise = rng.normal(scale=0.1, size=picture.shape).astype(np.float32)
    return picture + noise, label


def make_pipeline() -> stoker.Pipeline:
    """Return what is prepared once for all jobs."""
    return stoker.from_dataset(Pictures(), seed=0).shuffle().random_map(flipped).batch(BATCH)


def network() -> nn.Module:
    """Return the network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, CLASSES)
    )


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> float:
    """Train for an epoch; return its mean loss."""
    losses = []
    for pictures, labels in batches:
        loss = nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)
