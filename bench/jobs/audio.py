"""A job on recordings: WAV files, a random part of each, as spectrograms of four widths."""

from __future__ import annotations

import random
import wave

import numpy as np
import torch
from loop import options, train
from torch import nn
from torch.utils.data import Dataset

LENGTH = 24_000
WIDTHS = 256, 400, 640, 1024


class Recordings(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.rglob("*.wav"))
        self.bands = [
            torch.rand(64, width // 2 + 1, generator=torch.Generator().manual_seed(width))
            for width in WIDTHS
        ]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file, wave.open(file) as recording:
            raw = recording.readframes(recording.getnframes())
        sound = torch.from_numpy(np.frombuffer(raw, np.int16).astype(np.float32) / 32768)
        start = random.randint(0, max(0, len(sound) - LENGTH))
        sound = nn.functional.pad(sound[start : start + LENGTH], (0, max(0, LENGTH - len(sound))))
        views = [
            bands @ torch.stft(sound, width, 160, window=torch.hann_window(width),
                               return_complex=True).abs()
            for width, bands in zip(WIDTHS, self.bands, strict=True)
        ]  # fmt: skip
        return torch.stack(views).mean(0).log1p(), index % 10


if __name__ == "__main__":
    given = options()
    model = nn.Sequential(
        nn.Conv1d(64, 32, 5, 4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(8),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    train(Recordings(given.folder), model, given)
