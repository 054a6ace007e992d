"""Times a peer on a folder of JPEGs; ``images.py`` starts it, and ``../serve.py`` answers.

A peer's file has ``epochs(folder, variant, batch, workers)``, which returns a function that starts
an epoch: an iterable of (images, labels), ``uint8 [batch, SIDE, SIDE, 3]``. The files are
``folder/LABEL/NAME.jpg``, ``.png`` or ``.webp``.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # behind packages of the same names as peers

from serve import serve

SIDE = int(os.environ.get("SIDE", "224"))


def files_of(folder: str) -> list[tuple[str, int]]:
    """Return all files and their labels."""
    found = sorted(Path(folder).glob("*/*.*"))
    labels = {name: number for number, name in enumerate(sorted({p.parent.name for p in found}))}
    return [(str(path), labels[path.parent.name]) for path in found]


def box(height: int, width: int, uniform: Any) -> tuple[int, int, int, int]:
    """Draw top, left, height and width as torchvision's ``RandomResizedCrop`` does."""
    for _ in range(10):
        area = height * width * (0.08 + 0.92 * uniform())
        aspect = math.exp(math.log(3 / 4) + math.log(16 / 9) * uniform())
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(uniform() * (height - h + 1)), int(uniform() * (width - w + 1)), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def main() -> None:
    name, folder, variant, batch, workers = sys.argv[1:6]
    began = time.perf_counter()
    epoch = importlib.import_module(name).epochs(folder, variant, int(batch), int(workers))
    batches = iter(epoch())
    images, _ = next(batches)
    about = {"first_s": time.perf_counter() - began}
    assert tuple(images.shape) == (int(batch), SIDE, SIDE, 3), images.shape
    for _ in batches:
        pass
    serve(about, epoch)


if __name__ == "__main__":
    main()
