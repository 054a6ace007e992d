"""torch's DataLoader over JPEGs.

Variants: ``pillow``, ``opencv``, and ``simplejpeg``, where OpenCV resizes.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from serve_jpegs import SIDE, box, files_of
from torch.utils.data import DataLoader, Dataset


def by_pillow(path: str) -> Any:
    from PIL import Image

    with Image.open(path) as file:
        image = file.convert("RGB")
    top, left, height, width = box(image.height, image.width, random.random)
    image = image.crop((left, top, left + width, top + height))
    made = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    return made[:, ::-1].copy() if random.random() < 0.5 else made


def by_hand(path: str, by: str) -> Any:
    from crops import cropped

    with open(path, "rb") as file:
        return cropped(file.read(), random.random, by)


class Crops(Dataset[Any]):
    """Random resized crops of files."""

    def __init__(self, folder: str, crop: Callable[[str], Any]) -> None:
        self._files, self._crop = files_of(folder), crop

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        path, label = self._files[index]
        return self._crop(path), label


CROPS = {"pillow": by_pillow} | {by: partial(by_hand, by=by) for by in ("opencv", "simplejpeg")}


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    warnings.filterwarnings("ignore", message=".*not writable.*")
    loader: DataLoader[Any] = DataLoader(
        Crops(folder, CROPS[variant]),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
    )
    return lambda: loader
