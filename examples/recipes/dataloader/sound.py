"""What examples/recipes/sound.py has from its pipelines, from a DataLoader."""

from pathlib import Path

import numpy as np
import soundfile
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

BATCH = 64
RATE = 16_000
SECONDS = 1.0
FILES = [".wav", ".flac", ".ogg"]
WORKERS = 8


# The data.
class Sounds(Dataset):
    def __init__(self, folder, is_random, classes=None):
        self.is_random = is_random
        self.classes = classes or sorted(each.name for each in Path(folder).iterdir())
        self.files = sorted(f for f in Path(folder).glob("*/*") if f.suffix.lower() in FILES)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        where, loudness = torch.rand(2).tolist() if self.is_random else (0.5, 0.5)
        wanted = int(SECONDS * RATE)
        with soundfile.SoundFile(file) as sound:
            if sound.samplerate != RATE:
                raise ValueError(f"{file}: {sound.samplerate} samples/s, not {RATE}")
            sound.seek(int(where * max(0, sound.frames - wanted)))
            samples = sound.read(wanted, dtype="float32", always_2d=True).mean(1)
        samples = np.pad(samples, (0, wanted - len(samples))) * np.float32(0.5 + loudness)
        return samples, self.classes.index(file.parent.name)


train_set = Sounds("train", is_random=True)
train = StatefulDataLoader(
    train_set,
    BATCH,
    shuffle=True,
    num_workers=WORKERS,
    persistent_workers=True,
    pin_memory=torch.cuda.is_available(),
)
valid_set = Sounds("valid", is_random=False, classes=train_set.classes)
valid = DataLoader(valid_set, BATCH, num_workers=WORKERS)
