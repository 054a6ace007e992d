"""LitData: its own chunks of the files' bytes, decoded by simplejpeg and resized by OpenCV."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import litdata
import numpy as np
from crops import cropped
from serve_jpegs import files_of


def packed(file: tuple[str, int]) -> tuple[bytes, int]:
    path, label = file
    return Path(path).read_bytes(), label


def collated(some: list[tuple[bytes, int]]) -> tuple[Any, Any]:
    images = np.stack([cropped(data, random.random) for data, _ in some])
    return images, np.array([label for _, label in some])


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    home = tempfile.mkdtemp(prefix="litdata-")
    atexit.register(partial(shutil.rmtree, home, ignore_errors=True))
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{home}/cache"
    litdata.optimize(
        packed,
        files_of(folder),
        output_dir=f"{home}/chunks",
        chunk_bytes="64MB",
        num_workers=1,
    )
    dataset = litdata.StreamingDataset(f"{home}/chunks", shuffle=True, drop_last=True)
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=batch,
        num_workers=workers,
        collate_fn=collated,
        persistent_workers=True,
        drop_last=True,
    )
    return lambda: loader
