"""Grain: row numbers are shuffled and batched, and a map gathers whole batches, in threads.

Processes (``mp_prefetch``) and a map of single rows are slower here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grain
import numpy as np

PACKAGE = "grain"


def epochs(
    images: Any, labels: Any, batch: int, workers: int
) -> Callable[[], Iterable[tuple[Any, Any]]]:
    rows = grain.MapDataset.range(len(labels))
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=4 * workers)
    seeds = np.random.default_rng(0)

    def gather(indices: Any) -> tuple[Any, Any]:
        return images[indices], labels[indices]

    def epoch() -> Iterable[tuple[Any, Any]]:
        order = rows.shuffle(seed=int(seeds.integers(1 << 31)))
        return order.batch(batch).map(gather).to_iter_dataset(options)

    return epoch
