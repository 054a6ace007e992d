"""DALI: external_source with whole batches made by NumPy; the pipeline needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def

PACKAGE = "nvidia-dali-cuda120"


def epochs(
    images: Any, labels: Any, batch: int, workers: int
) -> Callable[[], Iterable[tuple[Any, Any]]]:
    generator = np.random.default_rng(0)

    def batches() -> Iterator[tuple[Any, Any]]:
        order = generator.permutation(len(labels))
        for i in range(0, len(order), batch):
            indices = order[i : i + batch]
            yield images[indices], labels[indices, None]

    @pipeline_def(batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=2)
    def pipeline() -> Any:
        return tuple(fn.external_source(source=batches, num_outputs=2, cycle="raise", no_copy=True))

    built = pipeline()
    built.build()

    def epoch() -> Iterator[tuple[Any, Any]]:
        while True:
            try:
                made = built.run()
            except StopIteration:
                built.reset()
                return
            yield made[0].as_array(), made[1].as_array()

    return epoch
