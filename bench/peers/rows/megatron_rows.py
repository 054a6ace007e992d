"""Megatron Core: GPTDataset over its indexed dataset, read by a torch DataLoader.

It packs documents into windows. Positions and masks are the same for all, its default: numbering
them by document takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from serve_rows import BATCHES, LENGTH, PACKED, WORKERS, Documents, tokens_of
from torch.utils.data import DataLoader

WIDTHS = {"windows": LENGTH, "packed": PACKED}


def write(task: str, folder: str) -> None:
    builder = IndexedDatasetBuilder(f"{folder}/megatron.bin", dtype=np.uint16)
    if task == "packed":
        documents = Documents(folder)
        for number in range(len(documents)):
            tokens = torch.from_numpy(documents[number])
            builder.add_document(tokens, [len(tokens)])
    else:
        tokens = torch.from_numpy(tokens_of(folder).astype(np.int32))
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{folder}/megatron.idx")
    opened(task, folder)  # its indices are built once, and kept in files


def opened(task: str, folder: str) -> Any:
    indexed = IndexedDataset(f"{folder}/megatron")
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=WIDTHS[task],
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=0, pad=-1, vocab_size=1 << 16, unique_identifiers={}),
        path_to_cache=f"{folder}/megatron-cache",
    )
    numbers = np.arange(len(indexed), dtype=np.int32)
    return GPTDataset(indexed, f"{folder}/megatron", numbers, None, Split.train, config)


def loader(task: str, folder: str) -> Any:
    made: DataLoader[Any] = DataLoader(
        opened(task, folder),
        batch_size=BATCHES[task],
        num_workers=WORKERS,
        persistent_workers=True,
        drop_last=True,
    )

    def epoch() -> Iterator[Any]:
        for batch in made:
            yield batch["tokens"], batch["labels"]

    return epoch


def windows(folder: str, variant: str) -> Any:
    return loader("windows", folder)


def packed(folder: str, variant: str) -> Any:
    return loader("packed", folder)
