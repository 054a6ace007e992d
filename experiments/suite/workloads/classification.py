"""What workloads that sort examples into classes share: loss, test, optimizer, flips and crops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import stoker
from experiments.suite.workload import Batch, Part, Score, Transform, Workload

_CLASSES = 10
_TESTED_AT_ONCE = 250
_MOMENTUM = 0.9
_NOISE = 0.05
_ALPHA = 0.2


def _random_noise(batch: Batch, rng: np.random.Generator) -> Batch:
    """Add noise of a twentieth of the pixels' standard deviation."""
    images, labels = batch
    pixels = images.float()
    draws = torch.from_numpy(rng.standard_normal(tuple(images.shape), np.float32))
    return _as_before(pixels + draws * (_NOISE * pixels.std()), images), labels


def _mixup(batch: Batch, rng: np.random.Generator) -> Batch:
    """Blend each image and its label with another's (Zhang et al., arXiv 1710.09412, section 2)."""
    images, labels = batch
    weight = torch.from_numpy(rng.beta(_ALPHA, _ALPHA, len(labels)).astype(np.float32))
    partner = torch.from_numpy(rng.permutation(len(labels)))

    def blend(rows: Any) -> Any:
        own = weight.reshape(-1, *[1] * (rows.ndim - 1))
        return rows * own + rows[partner] * (1 - own)

    shares = nn.functional.one_hot(labels, _CLASSES).float()
    return _as_before(blend(images.float()), images), blend(shares)


def _as_before(pixels: Any, images: Any) -> Any:
    """Return pixels in the images' dtype."""
    if images.is_floating_point():
        return pixels
    return pixels.round().clamp(0, 255).to(images.dtype)


IMAGE_TRANSFORMS: dict[str, Transform] = {
    "random_flip": stoker.images.random_flip,
    "random_erase": stoker.images.random_erase,
    "random_noise": _random_noise,
    "mixup": _mixup,
}
"""Those of batches of images and labels from 0 to 9, as tensors."""


class Classification(Workload):
    """Examples (array, label). A subclass sets `held_out` in `load`, and says what input is."""

    metric = "accuracy"
    held_out: dict[Part, tuple[NDArray[Any], NDArray[np.int64]]]
    """Prepared examples: arrays, labels int64 [n]."""

    def hold_out(self, validation: list[Any], test: list[Any]) -> None:
        """Prepare raw examples (anything, label) for `held_out`."""
        self.held_out = {}
        parts: tuple[tuple[Part, list[Any]], ...] = (("validation", validation), ("test", test))
        for part, raw in parts:
            arrays, labels = zip(*map(self.prepare, raw), strict=True)
            self.held_out[part] = np.stack(arrays), np.asarray(labels, np.int64)

    def input_of(self, arrays: Any) -> Any:
        """Turn a batch's arrays or tensors into what the network takes, float32."""
        raise NotImplementedError

    def optimizer(self, network: Any, learning_rate: float) -> Any:
        """Return SGD with Nesterov momentum, or without any."""
        momentum = _MOMENTUM if self.variant.momentum else 0.0
        return torch.optim.SGD(
            network.parameters(),
            lr=learning_rate if self.variant.momentum else learning_rate / (1 - _MOMENTUM),
            momentum=momentum,
            nesterov=self.variant.momentum,
            weight_decay=5e-4,
        )

    def loss(self, network: Any, batch: Batch) -> Any:
        """Return the cross entropy."""
        arrays, labels = batch
        return nn.functional.cross_entropy(network(self.input_of(arrays)), torch.as_tensor(labels))

    def score(self, network: Any, part: Part) -> Score:
        """Return cross entropy and accuracy of a whole part."""
        arrays, labels = self.held_out[part]
        loss = right = 0.0
        for start in range(0, len(arrays), _TESTED_AT_ONCE):
            chosen = slice(start, start + _TESTED_AT_ONCE)
            said, truth = network(self.input_of(arrays[chosen])), torch.as_tensor(labels[chosen])
            loss += float(nn.functional.cross_entropy(said, truth, reduction="sum"))
            right += float((said.argmax(1) == truth).sum())
        return Score(loss / len(arrays), right / len(arrays))


def shifted(image: NDArray[Any], reach_px: int, rng: np.random.Generator) -> NDArray[Any]:
    """Return the image [height, width, ...] moved by up to `reach_px` each way, zeros behind it.

    As a random crop of the image padded on all sides.
    """
    height, width = image.shape[:2]
    down, right = rng.integers(-reach_px, reach_px, size=2, endpoint=True).tolist()
    out = np.zeros_like(image)
    out[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
        max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
    ]
    return out


def normalisation(channels: int, *, is_batch: bool) -> Any:
    """Return BatchNorm for images, or a bias in its place where there is to be none."""
    return nn.BatchNorm2d(channels) if is_batch else nn.GroupNorm(1, channels)
