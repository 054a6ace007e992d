"""What examples/recipes/video.py has from its pipelines, from a DataLoader."""

import itertools
from pathlib import Path

import av
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

BATCH = 16
FRAMES = 16
SIZE = 112
FILES = [".mp4", ".mkv", ".webm"]
WORKERS = 8


# The data.
class Films(Dataset):
    def __init__(self, folder, is_random, classes=None):
        self.is_random = is_random
        self.classes = classes or sorted(each.name for each in Path(folder).iterdir())
        self.files = sorted(f for f in Path(folder).glob("*/*") if f.suffix.lower() in FILES)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        where, turned = torch.rand(2).tolist() if self.is_random else (0.5, 1)
        with av.open(str(self.files[index])) as film:
            video = film.streams.video[0]
            last_s = film.duration / av.time_base - FRAMES / video.average_rate
            first = (video.start_time or 0) + int(where * max(0, last_s) / video.time_base)
            film.seek(first, stream=video)
            seen = (frame for frame in film.decode(video) if frame.pts >= first)
            pictures = [
                frame.to_ndarray(width=SIZE, height=SIZE, format="rgb24")
                for frame in itertools.islice(seen, FRAMES)
            ]
        pictures = np.stack(pictures + pictures[-1:] * (FRAMES - len(pictures)))
        pictures = (
            torch.from_numpy(pictures).flip(2) if turned < 0.5 else torch.from_numpy(pictures)
        )
        return pictures, self.classes.index(self.files[index].parent.name)


train_set = Films("train", is_random=True)
train = StatefulDataLoader(
    train_set,
    BATCH,
    shuffle=True,
    num_workers=WORKERS,
    persistent_workers=True,
    pin_memory=torch.cuda.is_available(),
)
valid_set = Films("valid", is_random=False, classes=train_set.classes)
valid = DataLoader(valid_set, BATCH, num_workers=WORKERS)
