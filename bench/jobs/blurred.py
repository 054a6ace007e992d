"""A job on blurred photographs: the blur is in the dataset, or in the loop for whole batches."""

from __future__ import annotations

import argparse

import torch
from loop import options, train
from torch import nn

from images import SIZE, Photographs  # type: ignore[attr-defined]  # this folder's


class Blur:
    """Blurs images float32 [3, height, width], or a batch of such."""

    def __init__(self, reach: int) -> None:
        along = torch.exp(-(torch.linspace(-2, 2, 2 * reach + 1) ** 2))
        kernel = torch.outer(along, along)
        self.weight = (kernel / kernel.sum()).repeat(3, 1, 1, 1)
        self.reach = reach

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        batch = images if images.dim() == 4 else images[None]
        batch = nn.functional.conv2d(batch, self.weight, padding=self.reach, groups=3)
        return batch.view(images.shape)


class Blurred(Photographs):
    def __init__(self, folder, transform):
        super().__init__(folder)
        self.transform = transform

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return self.transform(image), label


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--reach", type=int, default=4, help="of the blur, in pixels")
    parser.add_argument("--moved", action="store_true", help="blur whole batches in the loop")
    given = options(parser)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.LazyLinear(10),
    )  # fmt: skip
    model(torch.zeros(1, 3, SIZE, SIZE))
    blur = Blur(given.reach)
    if given.moved:
        train(Photographs(given.folder), model, given, blur)
    else:
        train(Blurred(given.folder, blur), model, given)
