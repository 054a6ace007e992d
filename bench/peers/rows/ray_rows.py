"""Ray Data: blocks in random order, and a local buffer that batches are drawn from.

A file is read before. Read anew in each epoch, it takes seconds more: Ray starts processes for it,
and does not tell their processor time.
"""

from __future__ import annotations

from typing import Any

import ray
from serve_rows import BATCHES, WORKERS, columns_of

BUFFER = 100_000  # rows


def started() -> None:
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=2 << 30,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False


def batches(data: Any, task: str) -> Any:
    return lambda: data.iter_batches(
        batch_size=BATCHES[task],
        batch_format="numpy",
        local_shuffle_buffer_size=BUFFER,
        prefetch_batches=2,
        drop_last=True,
    )


def parquet(folder: str, variant: str) -> Any:
    started()
    data = ray.data.read_parquet(f"{folder}/rows.parquet")
    return batches(data.materialize().randomize_block_order(), "parquet")


def table(folder: str, variant: str) -> Any:
    import pyarrow as pa

    started()
    rows = pa.table(columns_of(folder))
    data = ray.data.from_arrow([rows.slice(start, BUFFER) for start in range(0, len(rows), BUFFER)])
    return batches(data.materialize().randomize_block_order(), "table")
