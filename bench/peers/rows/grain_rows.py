"""Grain: row numbers are shuffled and batched, and a map gathers whole batches, in threads.

Variants of ``windows``: ``array``, a memory map; ``records``, an ArrayRecord file. Documents are
packed by its own ConcatThenSplit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
from serve_rows import BATCHES, LENGTH, PACKED, WORKERS, Documents, columns_of, windows_of

GROUP = 1  # records that are stored together: single ones are found fastest


def write(task: str, folder: str) -> None:
    if task == "windows":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(
            f"{folder}/windows.array_record", f"group_size:{GROUP},uncompressed"
        )
        for window in windows_of(folder):
            writer.write(window.tobytes())
        writer.close()


def gathered(count: int, task: str, gather: Callable[[Any], Any]) -> Any:
    """Return a function that starts an epoch of batches that a map gathers."""
    rows = grain.MapDataset.range(count)
    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=4 * WORKERS)
    seeds = iter(range(1_000_000))

    def epoch() -> Any:
        order = rows.shuffle(seed=next(seeds))
        return order.batch(BATCHES[task]).map(gather).to_iter_dataset(options)

    return epoch


def windows(folder: str, variant: str) -> Any:
    if variant == "records":
        source = grain.sources.ArrayRecordDataSource(f"{folder}/windows.array_record")

        def gather(indices: Any) -> Any:
            data = b"".join(source.__getitems__(indices.tolist()))
            tokens = np.frombuffer(data, np.uint16).reshape(-1, LENGTH + 1).astype(np.int64)
            return tokens[:, :-1], tokens[:, 1:]

        return gathered(len(source), "windows", gather)
    rows = windows_of(folder)

    def of_array(indices: Any) -> Any:
        tokens = rows[indices].astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:]

    return gathered(len(rows), "windows", of_array)


def packed(folder: str, variant: str) -> Any:
    documents = grain.MapDataset.source(Documents(folder))
    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=64)
    seeds = iter(range(1_000_000))

    def epoch() -> Iterator[Any]:
        shuffled = documents.shuffle(seed=next(seeds)).map(lambda tokens: {"tokens": tokens})
        full = grain.experimental.ConcatThenSplitIterDataset(
            shuffled.to_iter_dataset(options), length_struct={"tokens": PACKED}
        )
        for batch in full.batch(BATCHES["packed"], drop_remainder=True):
            yield (batch["tokens"], batch["tokens_segment_ids"], batch["tokens_positions"])

    return epoch


def table(folder: str, variant: str) -> Any:
    columns = columns_of(folder)

    def gather(indices: Any) -> Any:
        return {name: column[indices] for name, column in columns.items()}

    return gathered(len(columns["n"]), "table", gather)


def parquet(folder: str, variant: str) -> Any:
    """Read rows one by one, and shuffle them in windows: the file's reader gives no batches."""
    rows = grain.experimental.ParquetIterDataset(f"{folder}/rows.parquet")
    seeds = iter(range(1_000_000))
    window = 200_000  # rows: as many as sixteen of eighty row groups have

    def epoch() -> Any:
        shuffled = grain.experimental.WindowShuffleIterDataset(
            rows, window_size=window, seed=next(seeds)
        )
        return shuffled.batch(BATCHES["parquet"])

    return epoch
