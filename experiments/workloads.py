"""The task that all arms train: one small network, one recipe, one evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import stoker
from stoker.basics.resources import usable_cores

_EVALUATED_AT_ONCE = 250
_LARGEST_SHIFT = 0.1


@stoker.thread_safe
def augment(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Shift every image by up to a tenth of its side, and change contrast and brightness.

    Takes uint8 [n, height, width, 3] and leaves it as it is; returns a new array like it.
    A batch at a time, for a call on every image would keep the training thread from the GIL.
    """
    n, height, width, _ = images.shape
    reach = (int(height * _LARGEST_SHIFT), int(width * _LARGEST_SHIFT))
    shifts = rng.integers(np.negative(reach), reach, size=(n, 2), endpoint=True).tolist()
    gains, offsets = rng.uniform(0.7, 1.3, (n, 1)), rng.uniform(-20, 20, (n, 1))
    # Contrast and brightness of 256 values an image, not of every pixel.
    levels = np.clip(np.arange(256) * gains + offsets, 0, 255).astype(np.uint8)
    shifted = np.zeros_like(images)
    for image, level, out, (y, x) in zip(images, levels, shifted, shifts, strict=True):
        out[max(y, 0) : height + min(y, 0), max(x, 0) : width + min(x, 0)] = level[
            image[max(-y, 0) : height + min(-y, 0), max(-x, 0) : width + min(-x, 0)]
        ]
    return shifted


@stoker.thread_safe
def augment_one(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Do the same to one image, uint8 [height, width, 3]."""
    augmented: NDArray[np.uint8] = augment(image[None], rng)[0]
    return augmented


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread, so that a second core is left for loading."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Learner:
    """A network in training. The same `seed` gives the same initial weights."""

    def __init__(
        self, classes: int, widths: tuple[int, ...], learning_rate: float, seed: int
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = _network(classes, widths)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=learning_rate, fused=True)
        self._loss = nn.CrossEntropyLoss()

    def step(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        """Make one training step on uint8 [n, height, width, 3] and int64 [n]."""
        self._optimizer.zero_grad()
        loss = self._loss(self._network(_scaled(images)), torch.from_numpy(labels))
        loss.backward()
        self._optimizer.step()

    def weights(self) -> dict[str, Any]:
        """Return a copy of the network's weights."""
        return {name: value.clone() for name, value in self._network.state_dict().items()}

    def restore(self, weights: dict[str, Any]) -> None:
        """Go back to such weights, to evaluate them."""
        self._network.load_state_dict(weights)

    def accuracy(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
        """Return the share of test images that are classified rightly. Uses every core."""

        def right(start: int) -> int:
            part = slice(start, start + _EVALUATED_AT_ONCE)
            with torch.inference_mode():
                guessed = self._network(_scaled(images[part])).argmax(1).numpy()
            return int((guessed == labels[part]).sum())

        self._network.eval()
        with ThreadPoolExecutor(usable_cores()) as threads:
            total = sum(threads.map(right, range(0, len(images), _EVALUATED_AT_ONCE)))
        self._network.train()
        return total / len(images)


def _network(classes: int, widths: tuple[int, ...]) -> Any:
    """Build a small convolutional network that takes images of any size from 8 pixels.

    The maximum over all places makes it indifferent to where the digit stands.
    """
    first, second, third = widths
    network: Any = nn.Sequential(
        nn.Conv2d(3, first, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU(),
        nn.Conv2d(first, second, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.Conv2d(second, third, 3, padding=1, bias=False), nn.BatchNorm2d(third), nn.ReLU(),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(third, classes),
    )  # fmt: skip
    return network.to(memory_format=torch.channels_last)


def _scaled(images: NDArray[np.uint8]) -> Any:
    """Turn uint8 [n, height, width, 3] into a float tensor [n, 3, height, width] around 0."""
    # Channels last in memory already: the permutation copies nothing.
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    return pixels.float().div_(255).sub_(0.2).div_(0.25)
