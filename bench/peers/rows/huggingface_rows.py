"""Hugging Face datasets, memory-mapped Arrow: batches of NumPy arrays.

Row numbers are shuffled for lists of tokens; tables are read in shards and shuffled in a buffer
(``to_iterable_dataset``, which its documentation calls faster): either takes the least processor
time that was found. Documents are packed once, before, by a batched map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from serve_rows import BATCHES, LENGTH, PACKED, Documents, columns_of, windows_of

SHARDS = 64
BUFFER = 10_000


def fixed(rows: Any, width: int) -> Any:
    """Return a dataset of a column of rows that have one length."""
    lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), width)
    return datasets.Dataset(pa.table({"tokens": lists}))


def grouped(some: dict[str, list[Any]]) -> dict[str, Any]:
    """Pack documents, as the ``group_texts`` of transformers' examples does."""
    tokens = np.concatenate(some["tokens"])
    whole = len(tokens) // PACKED * PACKED
    return {"tokens": list(tokens[:whole].reshape(-1, PACKED))}


def write(task: str, folder: str) -> None:
    datasets.disable_progress_bars()
    place = f"{folder}/huggingface-{task}"
    if task == "windows":
        fixed(np.ascontiguousarray(windows_of(folder)), LENGTH + 1).save_to_disk(place)
    elif task == "packed":
        documents = Documents(folder)
        order = np.random.default_rng(0).permutation(len(documents)).tolist()
        tokens = {"tokens": [documents[number].astype(np.uint16) for number in order]}
        made = datasets.Dataset.from_dict(tokens).with_format("numpy")
        made = made.map(grouped, batched=True, batch_size=len(made), keep_in_memory=True)
        fixed(np.stack(made["tokens"][:]), PACKED).save_to_disk(place)
    elif task == "parquet":
        path, cache = f"{folder}/rows.parquet", f"{folder}/huggingface-cache"
        datasets.Dataset.from_parquet(path, cache_dir=cache).save_to_disk(place)


def opened(task: str, folder: str) -> Any:
    return datasets.load_from_disk(f"{folder}/huggingface-{task}")


def batches(data: Any, task: str) -> Any:
    """Return a function that starts an epoch."""
    datasets.disable_progress_bars()
    seeds, size = iter(range(1_000_000)), BATCHES[task]
    stream = data.with_format("numpy").to_iterable_dataset(num_shards=SHARDS)

    def by_number() -> Any:
        shuffled = data.shuffle(seed=next(seeds), keep_in_memory=True).with_format("numpy")
        return shuffled.iter(size, drop_last_batch=True)

    def by_shards() -> Any:
        return stream.shuffle(next(seeds), buffer_size=BUFFER).iter(size, drop_last_batch=True)

    return by_number if task in ("windows", "packed") else by_shards


def split(epoch: Any) -> Iterator[Any]:
    for batch in epoch():
        rows = batch["tokens"].astype(np.int64)
        yield rows[:, :-1], rows[:, 1:]


def windows(folder: str, variant: str) -> Any:
    epoch = batches(opened("windows", folder), "windows")
    return lambda: split(epoch)


def packed(folder: str, variant: str) -> Any:
    epoch = batches(opened("packed", folder), "packed")

    def rows() -> Iterator[Any]:
        for batch in epoch():
            tokens = batch["tokens"].astype(np.int64)
            yield tokens, tokens

    return rows


def parquet(folder: str, variant: str) -> Any:
    return batches(opened("parquet", folder), "parquet")


def table(folder: str, variant: str) -> Any:
    return batches(datasets.Dataset(pa.table(columns_of(folder))), "table")
