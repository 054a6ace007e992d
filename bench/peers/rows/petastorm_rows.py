"""petastorm: a reader of Parquet batches in threads, shuffled in a buffer of torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from petastorm import make_batch_reader
from petastorm.pytorch import BatchedDataLoader
from serve_rows import BATCHES, WORKERS

BUFFER = 200_000  # rows: as many as sixteen of eighty row groups have


def parquet(folder: str, variant: str) -> Any:
    def epoch() -> Iterator[Any]:
        with make_batch_reader(
            f"file://{folder}/rows.parquet", workers_count=WORKERS, shuffle_row_groups=True
        ) as reader:
            yield from BatchedDataLoader(
                reader, batch_size=BATCHES["parquet"], shuffling_queue_capacity=BUFFER
            )

    return epoch
