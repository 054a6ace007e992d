"""Files of tokens as others write them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def write_megatron(path: Path, documents: list[list[list[int]]], code: int, dtype: str) -> None:
    """Write documents of sequences as Megatron-LM's ``IndexedDatasetBuilder`` does."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize
    bounds = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    parts = [head, lengths.tobytes(), pointers.tobytes(), bounds.tobytes()]
    path.with_suffix(".idx").write_bytes(b"".join(parts))
    path.with_suffix(".bin").write_bytes(b"".join(each.tobytes() for each in sequences))


def write_llm_c(path: Path, tokens: list[int], dtype: str = "<u2") -> None:
    magic = (20240520, 1) if dtype == "<u2" else (20240801, 7)
    head = np.zeros(256, "<i4")
    head[:3] = *magic, len(tokens)
    path.write_bytes(head.tobytes() + np.array(tokens, dtype).tobytes())
