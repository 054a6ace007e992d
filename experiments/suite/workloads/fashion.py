"""Fashion-MNIST: 28 x 28 grey images of ten kinds of clothing; crop and flip; a small network."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from experiments.suite.data import find
from experiments.suite.workload import Recipe, Transform
from experiments.suite.workloads.classification import (
    IMAGE_TRANSFORMS,
    Classification,
    normalisation,
    shifted,
)

_ORIGIN = "a folder with the four files of https://github.com/zalandoresearch/fashion-mnist"
_VALIDATION = 1_000
_TEST = 1_000
_REACH_PX = 2


class Fashion(Classification):
    """Two convolutions with BatchNorm, SGD with Nesterov momentum."""

    name = "fashion"
    title = "Fashion-MNIST, crop and flip; two convolutions, BatchNorm, Nesterov momentum"
    has_batch_norm = True
    transforms = tuple(IMAGE_TRANSFORMS)
    recipe = Recipe(batch_size=32, budget_fresh=9_600, learning_rates=(0.0125, 0.025, 0.05, 0.1))

    def load(self, folder: Path | None) -> None:
        """Read the idx files; the last training images are the validation part."""
        if folder is None:
            images, labels = _made_up(1_200)
            test = images[-100:], labels[-100:]
            held_out = 100
        else:
            files = find(folder, "fashion-mnist", _ORIGIN)
            images, labels = _read(files, "train")
            test_images, test_labels = _read(files, "t10k")
            test = test_images[:_TEST], test_labels[:_TEST]
            held_out = _VALIDATION
        self.held_out = {"validation": (images[-held_out:], labels[-held_out:]), "test": test}
        self.train = _Examples(images[:-held_out], labels[:-held_out])

    def augment(self, example: Any, rng: np.random.Generator) -> Any:
        """Shift the image by up to two pixels; mirror every other one."""
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
        """Scale uint8 [n, 28, 28] to float32 [n, 1, 28, 28] around 0."""
        return torch.as_tensor(arrays).unsqueeze(1).float().div_(255).sub_(0.286).div_(0.353)

    def network(self) -> Any:
        """Return two convolutions and a linear layer."""
        norm = self.variant.batch_norm
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), normalisation(16, is_batch=norm), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), normalisation(32, is_batch=norm), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 49, 10),
        )  # fmt: skip


class _Examples:
    """Images uint8 [28, 28], views, with their labels."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        return self._images[index], self._labels[index]


def _read(folder: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images uint8 [n, 28, 28] and labels int64 [n]."""
    with gzip.open(folder / f"{split}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28).copy()
    with gzip.open(folder / f"{split}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
    return images, labels


def _made_up(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return noise with a bright row that is the class."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 120, (count, 28, 28), dtype=np.uint8)
    labels = rng.integers(10, size=count)
    images[np.arange(count), 4 + 2 * labels] += 120
    return images, labels


WORKLOAD = Fashion
