"""stoker at its defaults."""

from __future__ import annotations

from typing import Any

from serve_rows import BATCHES, LENGTH, PACKED, Documents, columns_of

import stoker


def windows(folder: str, variant: str) -> Any:
    tokens = stoker.from_tokens(f"{folder}/tokens.bin", LENGTH, dtype="uint16", seed=0)
    train = tokens.shuffle().batch(BATCHES["windows"])
    return lambda: train


def packed(folder: str, variant: str) -> Any:
    documents = stoker.from_dataset(Documents(folder), seed=0).shuffle()
    train = documents.pack(PACKED).batch(BATCHES["packed"])
    return lambda: train


def parquet(folder: str, variant: str) -> Any:
    rows = stoker.from_parquet(f"{folder}/rows.parquet", seed=0).shuffle()
    train = rows.batch(BATCHES["parquet"])
    return lambda: train


def table(folder: str, variant: str) -> Any:
    import pyarrow as pa

    rows = stoker.from_table(pa.table(columns_of(folder)), seed=0).shuffle()
    train = rows.batch(BATCHES["table"])
    return lambda: train
