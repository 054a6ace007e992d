"""Frozen features: a network learns classes 0 to 4 of CIFAR-10; the others are seen through it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from experiments.equal_time import stacks
from experiments.equal_time.tasks import Cifar, Part
from experiments.equal_time.training import rate_at

_RATE, _WARM_UP = 0.05, 0.05
_KNOWN = 5


def write_features(folder: Path, device: str, steps: int) -> None:
    """Write what the network sees of each image of an unknown class: float32 [n, features].

    If they are there, they stay.
    """
    if (folder / "features-test-y.npy").exists():
        return
    task = Cifar(folder, device, None, True)
    weights = stacks.begin(task.shapes, [0], 1, device)
    normals, optimizer = task.normals(1), task.optimizer(weights)
    labels = np.load(folder / "cifar-train-y.npy")
    known = np.flatnonzero(labels < _KNOWN)
    rng = np.random.default_rng(0)
    for step in range(steps):
        items = torch.from_numpy(rng.choice(known, (1, task.batch_size))).to(device)
        dice = torch.from_numpy(rng.integers(1 << 30, size=(1, task.batch_size))).to(device)
        weights.requires_grad_(True)
        loss = task.losses(weights, task.batch("train", items, dice), normals, True).loss.mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = weights.detach()
        rate = torch.full((1, 1), _RATE * rate_at((step + 1) / steps, _WARM_UP), device=device)
        optimizer.step(weights, gradient, rate)
    of = stacks.named(task.shapes, weights)
    parts: tuple[Part, ...] = ("train", "validation", "test")
    for part in parts:
        truth = np.load(folder / f"cifar-{part}-y.npy")
        unknown = np.flatnonzero(truth >= _KNOWN)
        seen = []
        with torch.no_grad():
            for start in range(0, len(unknown), 512):
                items = torch.from_numpy(unknown[start : start + 512])[None].to(device)
                x, _ = task.batch(part, items, None)
                seen.append(task.features(of, x, normals, False)[0].cpu().numpy())
        np.save(folder / f"features-{part}-x.npy", np.concatenate(seen))
        np.save(folder / f"features-{part}-y.npy", truth[unknown] - _KNOWN)
