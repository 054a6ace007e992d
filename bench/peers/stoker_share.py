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


def counted(image: Any, rng: np.random.Generator) -> Any:
    """Note what is drawn: an example that is prepared twice in an epoch draws the same again."""
    with open(os.environ["SHARE_LOG"], "a") as log:
        log.write(f"{rng.integers(1 << 62)}\n")
    return cropped(image, rng)


def make() -> stoker.Pipeline:
    """Return the pipeline, from what the environment says."""
    crop = counted if "SHARE_LOG" in os.environ else cropped
    source = stoker.from_folder(os.environ["SHARE_FOLDER"], seed=0).shuffle()
    decoded = source.map(stoker.images.decode, on="image").random_map(crop, on="image")
    workers = decoded.workers(int(os.environ["SHARE_WORKERS"]), kind=os.environ["SHARE_KIND"])
    return workers.batch(int(os.environ["SHARE_BATCH"]), drop_last=True)


def main() -> None:
    role, jobs, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if role == "bare":
        print("ready", flush=True)
        sys.stdin.readline()
        return
    pipeline = (
        make() if role == "own" else stoker.feed(make, name=os.environ["SHARE_FEED"], jobs=jobs)
    )
    if role == "count":
        print(sum(1 for _ in range(number) for _ in pipeline))
        return

    def batches() -> Iterator[Any]:
        while True:
            yield from pipeline

    consume(batches, number)
    os._exit(0)


if __name__ == "__main__":
    main()
