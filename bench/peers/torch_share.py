"""A torch DataLoader in every job: read, decode, crop. See bench/share.py."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

try:
    from consuming import consume
except ImportError:  # as part of the package, for the loader alone
    from peers.consuming import consume


class Photographs(Dataset):
    """Files in class folders, decoded and cropped."""

    def __init__(self, folder: str, crop: int) -> None:
        self.files = sorted(str(path) for path in Path(folder).glob("*/*"))
        self.crop = crop

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index]) as image:
            pixels = np.asarray(image.convert("RGB"))
        high, wide = pixels.shape[:2]
        crop = self.crop
        if min(high, wide) < crop:
            pixels = np.pad(pixels, ((0, max(0, crop - high)), (0, max(0, crop - wide)), (0, 0)))
            high, wide = pixels.shape[:2]
        top, left = random.randint(0, high - crop), random.randint(0, wide - crop)
        cut = pixels[top : top + crop, left : left + crop]
        return torch.from_numpy(np.ascontiguousarray(cut)), index


def loader(folder: str, batch: int, crop: int, workers: int) -> DataLoader:
    """Return the loader, its workers staying between epochs."""
    return DataLoader(
        Photographs(folder, crop), batch, shuffle=True, num_workers=workers, drop_last=True,
        persistent_workers=True, prefetch_factor=2,
    )  # fmt: skip


def main(folder: str, batch: int, crop: int, warm: int, workers: int) -> None:
    torch.set_num_threads(1)
    made = loader(folder, batch, crop, workers)

    def batches() -> Iterator[Any]:
        while True:
            yield from made

    consume(batches, warm)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:6]))
