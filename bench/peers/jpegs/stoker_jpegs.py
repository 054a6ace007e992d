"""stoker over JPEGs: with and without its library in C, with the codec's scaling, with echoes.

Variants: ``fast``, ``pillow``, ``dct``; ``decode`` decodes in full, and keeps a corner; ``echo-E``
decodes in full and crops each of E uses, ``hand-E`` does the same by hand: two threads decode
ahead, the loop copies and crops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from serve_jpegs import SIDE, files_of

import stoker
from stoker.images import native


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    if variant == "pillow":
        vars(native)["library"] = lambda: None  # as if it were not installed
    elif native.library() is None:
        raise SystemExit("stoker-native is not installed: pip install ./native")
    kind, _, factor = variant.partition("-")
    crop = stoker.images.random_resized_crop(SIDE, flip_p=0.5, dct_scaling=kind == "dct")
    if kind == "hand":
        return lambda: by_hand(folder, crop, int(factor), batch, workers)
    train: Any = stoker.from_folder(folder, seed=0).shuffle()
    if kind in ("echo", "decode"):
        train = train.map(stoker.images.decode, on="image")
    if kind == "decode":
        train = train.map(corner, on="image")
    else:
        train = train.echo(int(factor), pool=8 * batch) if factor else train
        train = train.random_map(crop, on="image")
    train = train.batch(batch, drop_last=True).workers(workers)
    return lambda: train


def corner(image: Any) -> Any:
    return image[:SIDE, :SIDE]


def by_hand(
    folder: str, crop: Any, factor: int, batch: int, workers: int
) -> Iterator[tuple[Any, Any]]:
    """Draw from a pool of decoded images; all uses but an image's last get a copy, as in stoker."""
    rng = np.random.default_rng()
    files = files_of(folder)
    rng.shuffle(files)  # type: ignore[arg-type]
    waiting = iter(files)

    def decoded(path: str) -> Any:
        return stoker.images.decode(Path(path).read_bytes())

    def cropped(row: Any, image: Any, seed: int) -> None:
        row[:] = crop(image, np.random.default_rng(seed))

    with ThreadPoolExecutor(workers) as executor:
        ahead: deque[tuple[Future[Any], int]] = deque()

        def more(count: int) -> None:
            for path, label in islice(waiting, count):
                ahead.append((executor.submit(decoded, path), label))

        more(2 * batch)
        pool: list[list[Any]] = []
        made: deque[tuple[Any, Any, list[Future[None]]]] = deque()
        images, labels = np.empty((batch, SIDE, SIDE, 3), np.uint8), np.empty(batch, np.int64)
        jobs: list[Future[None]] = []
        while ahead or pool:
            while ahead and len(pool) < 8 * batch:
                image, label = ahead.popleft()
                pool.append([image.result(), label, factor])
                more(1)
            at = int(rng.integers(len(pool)))
            pool[at], pool[-1] = pool[-1], pool[at]
            held = pool[-1]
            held[2] -= 1
            labels[len(jobs)] = held[1]
            image = held[0].copy() if held[2] else pool.pop()[0]
            seed = int(rng.integers(1 << 62))
            jobs.append(executor.submit(cropped, images[len(jobs)], image, seed))
            if len(jobs) == batch:
                made.append((images, labels, jobs))
                images, labels, jobs = np.empty_like(images), np.empty_like(labels), []
            while len(made) > 2 or (made and not (ahead or pool)):
                done = made.popleft()
                for job in done[2]:
                    job.result()
                yield done[:2]
