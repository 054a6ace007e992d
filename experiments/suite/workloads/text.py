"""What the workloads on wikitext-2 share: windows of symbols, a small transformer, AdamW."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from experiments.suite.data import find
from experiments.suite.workload import Batch, Part, Score, Workload

_ORIGIN = (
    "a folder with the texts of WikiText-2 (https://huggingface.co/datasets/Salesforce/wikitext): "
    "train.block-shuffled.txt, the training text with its articles in any order, and test.txt"
)
_TESTED_AT_ONCE = 64


class Text(Workload):
    """A one-layer transformer that tells the next symbol; a subclass sets symbols and sizes.

    An example is a piece of text as long as two windows; its augmentation is where in it the window
    begins. Without augmentation that is at its start.
    """

    metric = "share of next symbols guessed"
    window: int
    """Symbols that are predicted in an example."""
    vocabulary: int
    """How many different symbols there are."""
    width: int
    """Numbers that stand for a symbol within the network."""
    heads = 4
    tested_windows = 256

    def symbols(self, folder: Path | None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return training and test text as numbers below `vocabulary`."""
        raise NotImplementedError

    def load(self, folder: Path | None) -> None:
        """Read the text; the last twentieth of the training text is the validation part."""
        train, test = self.symbols(folder)
        begins = len(train) - len(train) // 20
        self._held_out = {"validation": self._windows(train[begins:]), "test": self._windows(test)}
        self.train = _Pieces(train[:begins], 2 * self.window)

    def _windows(self, text: NDArray[Any]) -> Any:
        """Return windows from all over a text, int64 [n, window + 1]."""
        count = min(self.tested_windows, (len(text) - 1) // self.window)
        starts = np.linspace(0, len(text) - self.window - 1, count).astype(np.int64)
        return torch.from_numpy(text[starts[:, None] + np.arange(self.window + 1)].astype(np.int64))

    def augment(self, example: Any, rng: np.random.Generator) -> Any:
        """Choose where the window begins, int64 [window + 1]."""
        start = int(rng.integers(self.window)) if self.variant.augmentation else 0
        return example[start : start + self.window + 1].astype(np.int64)

    def network(self) -> Any:
        """Return the transformer."""
        return _transformer(self.vocabulary, self.window, self.width)

    def optimizer(self, network: Any, learning_rate: float) -> Any:
        """Return AdamW, or the same without momentum."""
        betas = (0.9 if self.variant.momentum else 0.0, 0.98)
        return torch.optim.AdamW(
            network.parameters(), lr=learning_rate, betas=betas, weight_decay=0.01, fused=True
        )

    def loss(self, network: Any, batch: Batch) -> Any:
        """Return the cross entropy of the next symbol, in nats."""
        windows = torch.as_tensor(batch)
        said = _said(network, windows[:, :-1], self.heads)
        return nn.functional.cross_entropy(said.flatten(0, 1), windows[:, 1:].flatten())

    def score(self, network: Any, part: Part) -> Score:
        """Return cross entropy, in nats, and the share of symbols that were the likeliest."""
        windows = self._held_out[part]
        loss, right = 0.0, 0.0
        for start in range(0, len(windows), _TESTED_AT_ONCE):
            chosen = windows[start : start + _TESTED_AT_ONCE]
            said, truth = (
                _said(network, chosen[:, :-1], self.heads).flatten(0, 1),
                chosen[:, 1:].flatten(),
            )
            loss += float(nn.functional.cross_entropy(said, truth, reduction="sum"))
            right += float((said.argmax(1) == truth).sum())
        symbols = len(windows) * self.window
        return Score(loss / symbols, right / symbols)


def texts(folder: Path) -> tuple[str, str]:
    """Return training and test text."""
    files = find(folder, "wikitext-2", _ORIGIN)
    train, test = files / "train.block-shuffled.txt", files / "test.txt"
    return train.read_text(encoding="utf-8"), test.read_text(encoding="utf-8")


class _Pieces:
    """Pieces of a text side by side, each of `length` numbers."""

    def __init__(self, text: NDArray[Any], length: int) -> None:
        self._pieces = text[: len(text) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> Any:
        return self._pieces[index]


def _transformer(vocabulary: int, window: int, width: int) -> Any:
    """Return the parts of one causal layer, for `_said`."""
    network = nn.ModuleDict(
        {
            "symbols": nn.Embedding(vocabulary, width),
            "places": nn.Embedding(window, width),
            "before": nn.LayerNorm(width),
            "asked": nn.Linear(width, 3 * width),
            "answer": nn.Linear(width, width),
            "between": nn.LayerNorm(width),
            "thought": nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            ),
            "after": nn.LayerNorm(width),
        }
    )
    for parameters in (network["symbols"].parameters(), network["places"].parameters()):
        for weights in parameters:
            nn.init.normal_(weights, std=1 / math.sqrt(width))
    return network


def _said(network: Any, symbols: Any, heads: int) -> Any:
    """Tell the next symbols: int64 [n, window] to float32 logits [n, window, vocabulary]."""
    x = network["symbols"](symbols) + network["places"].weight[: symbols.shape[1]]
    n, length, width = x.shape
    asked = network["asked"](network["before"](x)).view(n, length, 3, heads, width // heads)
    query, key, value = asked.permute(2, 0, 3, 1, 4)
    seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + network["answer"](seen.transpose(1, 2).reshape(n, length, width))
    x = x + network["thought"](network["between"](x))
    return nn.functional.linear(network["after"](x), network["symbols"].weight)
