"""CIFAR-10 as JPEG files: 32 x 32 colour images of ten classes; crop and flip; a small network."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import stoker
from experiments.suite.data import Files, find
from experiments.suite.workload import Recipe, Transform
from experiments.suite.workloads.classification import (
    IMAGE_TRANSFORMS,
    Classification,
    normalisation,
    shifted,
)

_ORIGIN = (
    "a tar archive of the images of https://www.cs.toronto.edu/~kriz/cifar.html as JPEG files, "
    "train/CLASS/NUMBER.jpg and test/CLASS/NUMBER.jpg"
)
_HELD_OUT = 1_000
_REACH_PX = 4


class Cifar(Classification):
    """Three convolutions with BatchNorm, SGD with Nesterov momentum; images decoded once a read."""

    name = "cifar"
    title = "CIFAR-10 as JPEG files, crop and flip; three convolutions, BatchNorm, momentum"
    has_batch_norm = True
    transforms = tuple(IMAGE_TRANSFORMS)
    recipe = Recipe(
        batch_size=32,
        budget_fresh=9_600,
        learning_rates=(0.0125, 0.035, 0.1),
        step_s=0.006,
    )

    def load(self, folder: Path | None) -> None:
        """Read the files; the validation part is drawn from those for training."""
        train, test = (_made_up(900), _made_up(100)) if folder is None else _read(folder)
        held_out = min(_HELD_OUT, len(test))
        order = np.random.default_rng(0).permutation(len(train)).tolist()
        some = np.random.default_rng(1).permutation(len(test))[:held_out].tolist()
        self.train = [train[i] for i in order[held_out:]]
        self.hold_out([train[i] for i in order[:held_out]], [test[i] for i in some])

    def prepare(self, raw: Any) -> Any:
        """Decode the image, uint8 [32, 32, 3]."""
        content, label = raw
        return stoker.images.decode(content), label

    def augment(self, example: Any, rng: np.random.Generator) -> Any:
        """Shift the image by up to four pixels; mirror every other one."""
        image, label = example
        if self.variant.augmentation:
            image = shifted(image, _REACH_PX, rng)
            if rng.random() < 0.5:
                image = image[:, ::-1].copy()
        return image, label

    def transform(self, name: str) -> Transform:
        """Return one of `IMAGE_TRANSFORMS`."""
        return IMAGE_TRANSFORMS[name]

    def input_of(self, arrays: Any) -> Any:
        """Scale uint8 [n, 32, 32, 3] to float32 [n, 3, 32, 32] around 0."""
        pixels = torch.as_tensor(arrays).permute(0, 3, 1, 2)
        return pixels.float().div_(255).sub_(0.473).div_(0.252)

    def network(self) -> Any:
        """Return three convolutions and a linear layer."""
        norm = self.variant.batch_norm
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), normalisation(16, is_batch=norm), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), normalisation(32, is_batch=norm), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), normalisation(64, is_batch=norm), nn.ReLU(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip


def _read(folder: Path) -> tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]:
    """Return the files for training and for testing, with their labels."""
    files = Files(find(folder, "cifar10-jpg.tar.xz", _ORIGIN))
    parted: dict[str, list[tuple[bytes, int]]] = {"train": [], "test": []}
    classes: dict[str, int] = {}
    for i, name in enumerate(files.names):
        if name.endswith(".jpg"):
            split, kind, _ = name.split("/")
            parted[split].append((files[i], classes.setdefault(kind, len(classes))))
    return parted["train"], parted["test"]


def _made_up(count: int) -> list[tuple[bytes, int]]:
    """Return dark noise with a bright row that is the class."""
    rng = np.random.default_rng(count)
    made = []
    for number in range(count):
        pixels = rng.integers(0, 100, (32, 32, 3), dtype=np.uint8)
        pixels[3 + 3 * (number % 10) :][:2] += 150
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "JPEG")
        made.append((content.getvalue(), number % 10))
    return made


WORKLOAD = Cifar
