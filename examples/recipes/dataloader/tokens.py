"""What examples/recipes/tokens.py has from its pipelines, from a DataLoader."""

import bisect
import glob
import itertools

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

BATCH = 64
LENGTH = 512
WORKERS = 4


# The data.
class Windows(Dataset):
    def __init__(self, pattern):
        files = sorted(glob.glob(pattern))
        self.files = [np.memmap(file, np.uint16, "r") for file in files]
        self.ends = list(itertools.accumulate((len(file) - 1) // LENGTH for file in self.files))

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, index):
        number = bisect.bisect_right(self.ends, index)
        first = (index - (self.ends[number - 1] if number else 0)) * LENGTH
        window = torch.from_numpy(self.files[number][first : first + LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


def passes(loader):
    while True:
        yield from loader


train = StatefulDataLoader(
    Windows("train-*.bin"),
    BATCH,
    shuffle=True,
    drop_last=True,
    num_workers=WORKERS,
    persistent_workers=True,
    pin_memory=torch.cuda.is_available(),
)
endless = passes(train)  # for step in range(STEPS): inputs, targets = next(endless)
valid = DataLoader(Windows("valid.bin"), BATCH, num_workers=WORKERS)
