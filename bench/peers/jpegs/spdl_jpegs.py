"""SPDL over image files: threads whose tasks are several files, for OpenCV (two-pixel bilinear).

Variant ``simplejpeg`` decodes by simplejpeg, and lets OpenCV resize.

SPDL's own decoder needs the libraries of FFmpeg, which its wheel does not bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from crops import cropped
from serve_jpegs import files_of
from spdl.pipeline import PipelineBuilder

CHUNK = 16  # files a task: single ones cost more to hand over


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    by = variant or "opencv"
    files = files_of(folder)
    rng = np.random.default_rng()

    def crops(some: list[tuple[int, int]]) -> list[tuple[Any, int]]:
        made = []
        for at, seed in some:
            path, label = files[at]
            draws = np.random.default_rng(seed)
            made.append((cropped(Path(path).read_bytes(), draws.random, by), label))
        return made

    def chunks() -> Iterator[list[tuple[int, int]]]:
        order = rng.permutation(len(files))[: len(files) // batch * batch]
        seeds = rng.integers(1 << 62, size=len(order))
        for start in range(0, len(order), CHUNK):
            some = slice(start, start + CHUNK)
            yield list(zip(order[some].tolist(), seeds[some].tolist(), strict=True))

    def stacked(groups: list[list[tuple[Any, int]]]) -> tuple[Any, Any]:
        images, labels = zip(*[pair for group in groups for pair in group], strict=True)
        return np.stack(images), np.array(labels)

    def epoch() -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(chunks())
            .pipe(crops, concurrency=workers)
            .aggregate(batch // CHUNK)
            .pipe(stacked)
            .add_sink(4)
            .build(num_threads=workers + 1)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return epoch
