"""stoker, a pipeline of its own in every job, or one that they share. See bench/share.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from consuming import consume

import stoker


def cropped(image: Any, rng: np.random.Generator) -> Any:
    """Cut a square out of an image, padded where it is smaller."""
    crop = int(os.environ["SHARE_CROP"])
    high, wide = image.shape[:2]
    if min(high, wide) < crop:
        image = np.pad(image, ((0, max(0, crop - high)), (0, max(0, crop - wide)), (0, 0)))
        high, wide = image.shape[:2]
    top, left = rng.integers(high - crop + 1), rng.integers(wide - crop + 1)
    return image[top : top + crop, left : left + crop]


def make() -> stoker.Pipeline:
    """Return the pipeline, from what the environment says."""
    source = stoker.from_folder(os.environ["SHARE_FOLDER"], seed=0).shuffle()
    decoded = source.map(stoker.images.decode, on="image").random_map(cropped, on="image")
    return decoded.batch(int(os.environ["SHARE_BATCH"]), drop_last=True)


def main() -> None:
    role, jobs, warm = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pipeline = make() if role == "own" else stoker.share(make, name="bench-share", jobs=jobs)

    def batches() -> Iterator[Any]:
        while True:
            yield from pipeline

    consume(batches, warm)
    os._exit(0)


if __name__ == "__main__":
    main()
