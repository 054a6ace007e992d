"""What examples/recipes/shards.py has from its pipelines, from WebDataset: no state in an epoch."""

import glob

import torch
import webdataset
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


def loader(shards, transform, shuffle):
    found = webdataset.WebDataset(
        sorted(glob.glob(shards)),
        shardshuffle=shuffle and 100,
        empty_check=False,  # else a worker without a shard fails
    )
    found = found.shuffle(shuffle and 1_000).decode("pilrgb").to_tuple("jpg", "cls")
    found = found.map_tuple(transform, int).batched(BATCH)
    return webdataset.WebLoader(found, batch_size=None, num_workers=WORKERS)


train = loader("train-*.tar", varied, shuffle=True)
valid = loader("valid.tar", middle, shuffle=False)
