"""No packed document sees another: with the arguments of varlen attention, and with a block mask.

The kernels of varlen attention need a GPU. Here attention is computed on slices by ``cu_seqlens``,
which is what these kernels do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.collate import varlen

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
WIDTH, HEADS, VOCABULARY, LENGTH = 16, 2, 50, 32


class Model(nn.Module):
    """A causal transformer of two layers over one row of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def losses(self, batch: Any, attend: Attend) -> torch.Tensor:
        """Return the loss of each token that predicts the next one."""
        tokens, labels = batch["input_ids"].ravel(), batch["labels"].ravel()
        places = batch["positions" if "positions" in batch else "position_ids"].ravel()
        hidden = self.embed(tokens) + self.place(places.long())
        for mix in self.mix:
            q, k, v = mix(hidden).view(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
            hidden = hidden + attend(q, k, v).transpose(0, 1).reshape(-1, WIDTH)
        logits = self.head(hidden)[:-1]
        return nn.functional.cross_entropy(logits, labels[1:], reduction="none")


def of_slices(begins: torch.Tensor) -> Attend:
    """Attend within the documents that begin there, as varlen kernels do."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bounds = begins.tolist()
        parts = [
            nn.functional.scaled_dot_product_attention(
                q[:, a:b], k[:, a:b], v[:, a:b], is_causal=True
            )
            for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(parts, dim=1)

    return attend


def of_mask(mask: torch.Tensor) -> Attend:
    return lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_flash(batch: Any) -> Attend:
    assert batch["max_seqlen"] == int(batch["seq_lens"].max())
    return of_slices(batch["cu_seqlens"])


def with_transformers(batch: Any) -> Attend:
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist()
    return of_slices(batch["cu_seq_lens_q"])


def with_block_mask(batch: Any) -> Attend:
    segments = batch["segments"].ravel()
    causal = torch.ones(len(segments), len(segments), dtype=torch.bool).tril()
    return of_mask(causal & (segments[:, None] == segments[None, :]))


def with_causal_mask(batch: Any) -> Attend:
    count = batch["input_ids"].numel()
    return of_mask(torch.ones(count, count, dtype=torch.bool).tril())


WAYS: dict[str, tuple[Any, Callable[[Any], Attend]]] = {
    "flash": (varlen(), with_flash),
    "transformers": (varlen("transformers"), with_transformers),
    "block mask": (None, with_block_mask),
}


def losses(first: int, way: str, attention: Callable[[Any], Attend] | None = None) -> list[float]:
    """Return the losses of two rows of documents, whose first one has these tokens."""
    draw = np.random.default_rng(0)
    documents = [{"input_ids": draw.integers(VOCABULARY, size=n)} for n in (12, 9, 7, 20, 30)]
    documents[0]["input_ids"][:] = first
    collate, default = WAYS[way]
    train = stoker.from_dataset(documents).pack(
        LENGTH, fields=["input_ids"], labels="labels", fit="best", window=3
    )
    torch.manual_seed(0)
    model, found = Model(), list[float]()
    for batch in train.batch(1, collate=collate).to_torch():
        each = model.losses(batch, (attention or default)(batch))
        found += each[batch["labels"].ravel()[1:] >= 0].tolist()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_no_document_changes_the_loss_of_another(way: str) -> None:
    one, other = losses(1, way), losses(2, way)
    changed = [number for number, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    assert len(one) == 12 + 9 + 7 + 20 + 30 - 5
    assert len(changed) == 11  # the targets in the first document
    assert changed == list(range(changed[0], changed[0] + 11))


def test_the_ways_agree_and_a_causal_mask_alone_leaks() -> None:
    flash, *others = (losses(1, way) for way in WAYS)
    for each in others:
        assert each == pytest.approx(flash, rel=1e-5)
    one, other = (losses(first, "block mask", with_causal_mask) for first in (1, 2))
    assert sum(a != b for a, b in zip(one, other, strict=True)) > 11
