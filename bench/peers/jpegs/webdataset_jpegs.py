"""WebDataset: tar shards of the files, decoded by simplejpeg and resized by OpenCV in processes."""

from __future__ import annotations

import atexit
import io
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from crops import cropped
from serve_jpegs import files_of

SHARDS = 8


def write_shards(folder: str, files: list[tuple[str, int]]) -> None:
    """Spread files over tar archives, as ``tarp`` or ``ShardWriter`` do."""
    for shard in range(SHARDS):
        with tarfile.open(f"{folder}/{shard:02}.tar", "w") as tar:
            for number in range(shard, len(files), SHARDS):
                path, label = files[number]
                for suffix, data in (("jpg", Path(path).read_bytes()), ("cls", b"%d" % label)):
                    info = tarfile.TarInfo(f"{number:06}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def collated(some: list[tuple[bytes, bytes]]) -> tuple[Any, Any]:
    images = np.stack([cropped(data, random.random) for data, _ in some])
    return images, np.array([int(label) for _, label in some])


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    made = tempfile.mkdtemp(prefix="webdataset-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    files = files_of(folder)
    write_shards(made, files)
    dataset = (
        webdataset.WebDataset(f"{made}/{{00..{SHARDS - 1:02}}}.tar", shardshuffle=SHARDS)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .batched(batch, collation_fn=collated, partial=False)
    )
    loader = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=True
    )
    return lambda: loader
