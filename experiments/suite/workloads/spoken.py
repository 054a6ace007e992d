"""Spoken digits (FSDD): spectrograms of short recordings; shift and masks; a small network."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from experiments.suite.data import Files, find
from experiments.suite.workload import Batch, Recipe, Transform
from experiments.suite.workloads.classification import (
    IMAGE_TRANSFORMS,
    Classification,
    normalisation,
)

_ORIGIN = "a tar archive of https://github.com/Jakobovski/free-spoken-digit-dataset"
_RATE_HZ = 8_000
_FRAME, _HOP = 256, 128
_FRAMES, _BANDS = 62, 32
_WINDOW = np.hanning(_FRAME).astype(np.float32)
_SHIFT = 6
_WIDEST_MASK = 6


class Spoken(Classification):
    """Two convolutions over log spectrograms, BatchNorm, SGD with Nesterov momentum."""

    name = "spoken"
    title = "spoken digits, spectrograms, shift and masks; two convolutions, BatchNorm, momentum"
    has_batch_norm = True
    transforms = ("random_mask", "random_noise", "mixup")
    recipe = Recipe(batch_size=32, budget_fresh=9_600, learning_rates=(0.0125, 0.035, 0.1))

    def load(self, folder: Path | None) -> None:
        """Read the recordings: 0 to 4 of each digit and speaker test, 5 to 9 validate."""
        parts: dict[str, list[tuple[bytes, int]]] = {"train": [], "validation": [], "test": []}
        for name, content in _made_up() if folder is None else _read(folder):
            digit, _, number = name.rpartition("/")[2].removesuffix(".wav").split("_")
            part = ("test", "validation")[int(number) // 5] if int(number) < 10 else "train"
            parts[part].append((content, int(digit)))
        self.train = parts["train"]
        self.hold_out(parts["validation"], parts["test"])

    def prepare(self, raw: Any) -> Any:
        """Turn a WAV file into a log spectrogram, float32 [frames, bands]."""
        content, label = raw
        with wave.open(io.BytesIO(content)) as file:
            sound = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return _spectrogram(sound), label

    def augment(self, example: Any, rng: np.random.Generator) -> Any:
        """Shift in time, by zeros; silence a few frames and a few bands."""
        spectrogram, label = example
        if self.variant.augmentation:
            by = int(rng.integers(-_SHIFT, _SHIFT, endpoint=True))
            moved = np.zeros_like(spectrogram)
            moved[max(by, 0) : _FRAMES + min(by, 0)] = spectrogram[
                max(-by, 0) : _FRAMES + min(-by, 0)
            ]
            for axis in range(2):
                width = int(rng.integers(_WIDEST_MASK + 1))
                start = int(rng.integers(moved.shape[axis] - width))
                moved[(slice(None),) * axis + (slice(start, start + width),)] = 0
            spectrogram = moved
        return spectrogram, label

    def transform(self, name: str) -> Transform:
        """Return one of `IMAGE_TRANSFORMS`, or one that silences a few bands more."""
        return _masked if name == "random_mask" else IMAGE_TRANSFORMS[name]

    def input_of(self, arrays: Any) -> Any:
        """Add an axis of one channel."""
        return torch.as_tensor(arrays).unsqueeze(1)

    def network(self) -> Any:
        """Return two convolutions and a linear layer."""
        norm = self.variant.batch_norm
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), normalisation(16, is_batch=norm), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), normalisation(32, is_batch=norm), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 8 * 4, 10),
        )  # fmt: skip


def _masked(batch: Batch, rng: np.random.Generator) -> Batch:
    """Silence a few bands, others in each recording."""
    spectrograms, labels = batch
    width = torch.from_numpy(rng.integers(_WIDEST_MASK + 1, size=(len(labels), 1, 1)))
    start = torch.from_numpy(rng.integers(_BANDS - _WIDEST_MASK, size=(len(labels), 1, 1)))
    bands = torch.arange(_BANDS)
    return spectrograms.masked_fill((bands >= start) & (bands < start + width), 0), labels


def _spectrogram(sound: NDArray[np.int16]) -> NDArray[np.float32]:
    """Return log energies in bands from 0 to 4 kHz, about 0 to 1, of the first second."""
    padded = np.zeros((_FRAMES - 1) * _HOP + _FRAME, np.float32)
    kept = sound[: len(padded)]
    padded[: len(kept)] = kept / 32_768
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::_HOP]
    power = np.abs(np.fft.rfft(frames * _WINDOW))[:, : _FRAME // 2] ** 2
    bands = power.reshape(_FRAMES, _BANDS, -1).mean(2)
    scaled: NDArray[np.float32] = (np.log1p(1e4 * bands) / 10).astype(np.float32)
    return scaled


def _read(folder: Path) -> list[tuple[str, bytes]]:
    files = Files(find(folder, "fsdd.tar", _ORIGIN))
    return [(name, files[i]) for i, name in enumerate(files.names) if name.endswith(".wav")]


def _made_up() -> list[tuple[str, bytes]]:
    """Return tones, whose pitch is the digit, in noise."""
    rng = np.random.default_rng(0)
    time_s = np.arange(_RATE_HZ // 2) / _RATE_HZ
    made = []
    for digit in range(10):
        for number in range(50):
            tone = 4_000 * np.sin(2 * np.pi * (300 + 300 * digit) * time_s)
            sound = (tone + rng.normal(0, 1_000, len(time_s))).astype(np.int16)
            content = io.BytesIO()
            with wave.open(content, "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(_RATE_HZ)
                file.writeframes(sound.tobytes())
            made.append((f"{digit}_nobody_{number}.wav", content.getvalue()))
    return made


WORKLOAD = Spoken
