"""torch's DataLoader over a memory map, over documents that a loop packs, over an Arrow table.

The variant is the number of workers. A dataset is asked for whole batches, by a BatchSampler: one
row a call is several times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from serve_rows import BATCHES, PACKED, Documents, columns_of, windows_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

TOGETHER = 16  # row groups that are shuffled together


def loader(dataset: Any, variant: str, sampler: Any = None) -> Any:
    """Return a function that starts an epoch of a loader whose dataset makes batches."""
    workers = int(variant)
    made: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: made


def of_batches(dataset: Any, task: str, variant: str) -> Any:
    sampler = BatchSampler(RandomSampler(dataset), BATCHES[task], drop_last=True)
    return loader(dataset, variant, sampler)


class Windows(Dataset[Any]):
    """Windows of a mapped file, a batch a call."""

    def __init__(self, folder: str) -> None:
        self._windows = windows_of(folder)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, indices: list[int]) -> Any:
        rows = torch.from_numpy(self._windows[indices].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


class Packed(IterableDataset[Any]):
    """Batches of full sequences, from the documents of a worker."""

    def __init__(self, folder: str) -> None:
        self._documents, self._epoch = Documents(folder), 0

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        info, size = get_worker_info(), BATCHES["packed"]
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = np.random.default_rng(self._epoch).permutation(len(self._documents))
        row = at = number = 0
        for index in order[worker::workers].tolist():
            document, begin = self._documents[index], 0
            while begin < len(document):
                if not row and not at:
                    kinds = (np.int64, np.int32, np.int32)
                    tokens, segments, positions = (np.empty((size, PACKED), k) for k in kinds)
                count = min(len(document) - begin, PACKED - at)
                tokens[row, at : at + count] = document[begin : begin + count]
                segments[row, at : at + count] = number
                positions[row, at : at + count] = np.arange(count)
                at, begin, number = at + count, begin + count, number + 1
                if at == PACKED:
                    row, at, number = row + 1, 0, 0
                if row == size:
                    yield tuple(torch.from_numpy(each) for each in (tokens, segments, positions))
                    row = 0


class RowGroups(IterableDataset[Any]):
    """Batches of a Parquet file's rows, shuffled within some row groups, a worker's own."""

    def __init__(self, folder: str) -> None:
        self._path, self._epoch = f"{folder}/rows.parquet", 0

    def __iter__(self) -> Iterator[Any]:
        import pyarrow.parquet as pq

        self._epoch += 1
        info, size = get_worker_info(), BATCHES["parquet"]
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        draw = np.random.default_rng(self._epoch)
        with pq.ParquetFile(self._path) as file:
            groups = draw.permutation(file.num_row_groups)[worker::workers].tolist()
            for first in range(0, len(groups), TOGETHER):
                table = file.read_row_groups(groups[first : first + TOGETHER], use_threads=False)
                names = table.column_names
                columns = {name: table[name].to_numpy() for name in names}
                order = draw.permutation(len(table))
                for start in range(0, len(order), size):
                    rows = order[start : start + size]
                    yield {name: column[rows] for name, column in columns.items()}


class Table(Dataset[Any]):
    """Rows of an Arrow table, a batch a call."""

    def __init__(self, folder: str) -> None:
        import pyarrow as pa

        self._table = pa.table(columns_of(folder))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, indices: list[int]) -> Any:
        rows = self._table.take(indices)
        return {name: torch.from_numpy(rows[name].to_numpy()) for name in rows.column_names}


def windows(folder: str, variant: str) -> Any:
    return of_batches(Windows(folder), "windows", variant)


def packed(folder: str, variant: str) -> Any:
    return loader(Packed(folder), variant)


def parquet(folder: str, variant: str) -> Any:
    return loader(RowGroups(folder), variant)


def table(folder: str, variant: str) -> Any:
    return of_batches(Table(folder), "table", variant)
