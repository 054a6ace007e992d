"""MosaicML Streaming: its own shards of windows, read by a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import streaming
import torch
from serve_rows import BATCHES, LENGTH, WORKERS, windows_of
from torch.utils.data import DataLoader


def write(task: str, folder: str) -> None:
    columns = {"tokens": f"ndarray:uint16:{LENGTH + 1}"}
    with streaming.MDSWriter(out=f"{folder}/streaming", columns=columns) as writer:
        for window in windows_of(folder):
            writer.write({"tokens": np.ascontiguousarray(window)})


def windows(folder: str, variant: str) -> Any:
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        local=f"{folder}/streaming", shuffle=True, batch_size=BATCHES["windows"]
    )

    def collated(some: list[dict[str, Any]]) -> Any:
        return torch.from_numpy(np.stack([each["tokens"] for each in some]).astype(np.int64))

    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=BATCHES["windows"],
        num_workers=WORKERS,
        persistent_workers=True,
        collate_fn=collated,
        drop_last=True,
    )

    def epoch() -> Iterator[Any]:
        for rows in loader:
            yield rows[:, :-1], rows[:, 1:]

    return epoch
