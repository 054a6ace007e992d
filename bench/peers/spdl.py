"""SPDL: a pipeline whose tasks are whole batches (one example a task is 170 times slower)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from spdl.pipeline import PipelineBuilder

PACKAGE = "spdl"


def epochs(
    images: Any, labels: Any, batch: int, workers: int
) -> Callable[[], Iterable[tuple[Any, Any]]]:
    generator = np.random.default_rng(0)

    def gather(indices: Any) -> tuple[Any, Any]:
        return images[indices], labels[indices]

    def epoch() -> Iterator[tuple[Any, Any]]:
        order = generator.permutation(len(labels))
        pipeline = (
            PipelineBuilder()
            .add_source(order[i : i + batch] for i in range(0, len(order), batch))
            .pipe(gather, concurrency=workers)
            .add_sink(4)
            .build(num_threads=workers)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return epoch
