"""LitData: its own chunks of tokens, cut into blocks by TokensLoader.

Documents are joined as they were written and cut into blocks: packed, without their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import litdata
import numpy as np
import torch
from litdata.streaming.item_loader import TokensLoader
from serve_rows import BATCHES, LENGTH, PACKED, WORKERS, Documents, tokens_of

WIDTHS = {"windows": LENGTH + 1, "packed": PACKED}


def document(folder: str, number: int) -> Any:
    return torch.from_numpy(Documents(folder)[number].astype(np.uint16))


def part(folder: str, start: int) -> Any:
    return torch.from_numpy(np.array(tokens_of(folder)[start : start + 1_000 * WIDTHS["windows"]]))


def write(task: str, folder: str) -> None:
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{folder}/litdata-cache"
    if task == "windows":
        tokens = len(tokens_of(folder))
        function: Any = part
        inputs = list(range(0, tokens, 1_000 * WIDTHS[task]))
    else:
        draw = np.random.default_rng(0)
        function, inputs = document, draw.permutation(len(Documents(folder))).tolist()
    litdata.optimize(
        partial(function, folder),
        inputs,
        output_dir=f"{folder}/litdata-{task}",
        chunk_size=WIDTHS[task] * 4_000,
        item_loader=TokensLoader(),
        num_workers=1,
    )


def loader(task: str, folder: str) -> Any:
    dataset = litdata.StreamingDataset(
        f"{folder}/litdata-{task}",
        item_loader=TokensLoader(block_size=WIDTHS[task]),
        shuffle=True,
        drop_last=True,
    )
    return litdata.StreamingDataLoader(
        dataset, batch_size=BATCHES[task], num_workers=WORKERS, persistent_workers=True
    )


def windows(folder: str, variant: str) -> Any:
    made = loader("windows", folder)

    def epoch() -> Iterator[Any]:
        for rows in made:
            wide = rows.long()
            yield wide[:, :-1], wide[:, 1:]

    return epoch


def packed(folder: str, variant: str) -> Any:
    made = loader("packed", folder)

    def epoch() -> Iterator[Any]:
        for rows in made:
            wide = rows.long()
            yield wide, wide

    return epoch
