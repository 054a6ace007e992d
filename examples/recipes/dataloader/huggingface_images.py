"""What examples/recipes/huggingface_images.py has from its pipelines, from a DataLoader."""

import datasets
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.transforms import v2

BATCH = 128
SIZE = 224
WORKERS = 8

# The data.
pets = datasets.load_from_disk("pets")
ready = [
    v2.RGB(),
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]
varied = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), *ready])
middle = v2.Compose([v2.Resize(SIZE * 8 // 7), v2.CenterCrop(SIZE), *ready])


def transformed(part, transform):
    part = part.select_columns(["image", "label"])
    return part.with_transform(
        lambda rows: {"image": [transform(i) for i in rows["image"]], "label": rows["label"]}
    )


train = StatefulDataLoader(
    transformed(pets["train"], varied),
    BATCH,
    shuffle=True,
    num_workers=WORKERS,
    persistent_workers=True,
    pin_memory=torch.cuda.is_available(),
)
valid = DataLoader(transformed(pets["test"], middle), BATCH, num_workers=WORKERS)
