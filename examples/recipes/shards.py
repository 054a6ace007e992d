"""WebDataset's shards: train-*.tar and valid.tar, of files KEY.jpg and KEY.cls.

Whenever it was stopped, start it again: it continues after the last checkpoint.
"""

import os

import torch
from torch import nn

import stoker
from stoker import images

CLASSES = 1_000
EPOCHS = 30
BATCH = 256
SIZE = 224
SAVE_EVERY = 500  # steps
device = "cuda" if torch.cuda.is_available() else "cpu"


# The data.
def ready(pipeline):
    batches = pipeline.map(int, on="cls").batch(BATCH).to_torch(device)
    return batches.map(images.to_chw, on="jpg").map(images.normalize(), on="jpg")


train = ready(
    stoker.from_tar("train-*.tar", ["jpg", "cls"], seed=0)  # or "s3://bucket/train-{000..146}.tar"
    .shuffle()
    .random_map(images.random_resized_crop(SIZE, flip_p=0.5), on="jpg")
)
test = stoker.from_tar("valid.tar", ["jpg", "cls"])
valid = ready(test.map(images.resize_center_crop(resize=SIZE * 8 // 7, crop=SIZE), on="jpg"))

# The model: yours.
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 7, stride=4),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, CLASSES),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train))

# The loop.
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train}
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt", map_location=device)
    for name, part in parts.items():
        part.load_state_dict(saved[name])


def save():
    torch.save({name: part.state_dict() for name, part in parts.items()}, "checkpoint.tmp")
    os.replace("checkpoint.tmp", "checkpoint.pt")  # killed in between, there is the one before


@torch.no_grad()
def accuracy():
    model.eval()
    right = [model(batch["jpg"]).argmax(1) == batch["cls"] for batch in valid]
    model.train()
    return torch.cat(right).float().mean().item()


while train.epoch < EPOCHS:
    for batch in train:
        loss = nn.functional.cross_entropy(model(batch["jpg"]), batch["cls"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if train.counts.steps % SAVE_EVERY == 0:
            save()
    save()
    print(f"epoch {train.epoch}: loss {loss:.3f}, accuracy {accuracy():.3f}")
