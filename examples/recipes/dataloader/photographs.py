"""What examples/recipes/photographs.py has from its pipelines, from a DataLoader.

But for the cache and the echo.
"""

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

BATCH = 256
SIZE = 224
WORKERS = 8

# The data.
ready = [
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]
varied = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), *ready])
middle = v2.Compose([v2.Resize(SIZE * 8 // 7), v2.CenterCrop(SIZE), *ready])
train_set, valid_set = ImageFolder("train", varied), ImageFolder("valid", middle)
assert valid_set.classes == train_set.classes  # else their labels mean other things
train = StatefulDataLoader(
    train_set,
    BATCH,
    shuffle=True,
    num_workers=WORKERS,
    persistent_workers=True,
    pin_memory=torch.cuda.is_available(),
)
valid = DataLoader(valid_set, BATCH, num_workers=WORKERS)
