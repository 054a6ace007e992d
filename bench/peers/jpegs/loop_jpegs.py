"""A loop by hand over image files, in one thread: read, decode, crop by OpenCV, stack.

Variants: ``opencv`` and ``simplejpeg``, what decodes; with ``-decode`` behind it files are decoded
in full, and a corner is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from crops import cropped, decoded
from serve_jpegs import SIDE, files_of


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    files = files_of(folder)
    by, _, whole = variant.partition("-")

    def image(path: str) -> Any:
        data = Path(path).read_bytes()
        return decoded(data, by)[:SIDE, :SIDE] if whole else cropped(data, random.random, by)

    def epoch() -> Iterator[tuple[Any, Any]]:
        random.shuffle(files)
        for at in range(0, len(files) - batch + 1, batch):
            some = files[at : at + batch]
            yield np.stack([image(path) for path, _ in some]), np.array([n for _, n in some])

    return epoch
