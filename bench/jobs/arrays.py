"""A job on arrays: documents as files of token numbers, masked at random, counted by pairs."""

from __future__ import annotations

import numpy as np
import torch
from loop import options, train
from torch import nn
from torch.utils.data import Dataset

WORDS = 4096
LENGTH = 8192


class Documents(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.rglob("*.npy"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        tokens = np.load(self.paths[index])
        start = np.random.randint(0, max(1, len(tokens) - LENGTH))
        tokens = tokens[start : start + LENGTH]
        tokens = tokens[np.random.rand(len(tokens)) > 0.15].astype(np.int64)
        counts = np.zeros(WORDS, np.float32)
        for gap in range(1, 33):
            pairs = (tokens[gap:] * 31 + tokens[:-gap]) % WORDS
            counts += np.bincount(pairs, minlength=WORDS)
        order = np.argsort(counts)[::-1][:512]
        return torch.from_numpy(np.log1p(counts[np.sort(order)])), index % 10


if __name__ == "__main__":
    given = options()
    train(
        Documents(given.folder),
        nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        given,
    )
