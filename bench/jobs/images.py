"""A job on photographs: JPEG files, decoded, cropped at random, resized."""

from __future__ import annotations

import random

import torch
from loop import options, train
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

SIZE = 96


class Photographs(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.rglob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        side = int(min(image.size) * random.uniform(0.6, 1.0))
        left = random.randint(0, image.width - side)
        top = random.randint(0, image.height - side)
        image = image.resize(
            (SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + side, top + side)
        )
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(SIZE, SIZE, 3).permute(2, 0, 1).float() / 255, index % 10


if __name__ == "__main__":
    given = options()
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.LazyLinear(10),
    )  # fmt: skip
    model(torch.zeros(1, 3, SIZE, SIZE))
    train(Photographs(given.folder), model, given)
