"""Photographs: train/CLASS/*.jpg and valid/CLASS/*.jpg, on storage that is too slow.

Whenever it was stopped, start it again: it continues after the last checkpoint.
"""

import math
import os

import torch
from torch import nn

import stoker
from stoker import images

EPOCHS = 90
BATCH = 256
SIZE = 224
LEARNING_RATE = 0.1
SAVE_EVERY = 500  # steps
ECHO = "auto"  # 2: every photograph twice, so that a resumed run is the same bit for bit
device = "cuda" if torch.cuda.is_available() else "cpu"


# The data.
def ready(pipeline):
    batches = pipeline.batch(BATCH).to_torch(device)
    return batches.map(images.to_chw, on="image").map(images.normalize(), on="image")


photographs = stoker.from_folder("train", seed=0, max_errors="0.1%")  # one in 1,000 may be broken
train = ready(
    photographs.shuffle()
    .cache(path="cache")  # files, on the local disk
    .map(images.decode, on="image")
    .echo(ECHO)  # while no fresh photograph is ready
    .random_map(images.random_resized_crop(SIZE, flip_p=0.5), on="image")  # again for each use
)
test = stoker.from_folder("valid", classes=train.class_names)
valid = ready(test.map(images.resize_center_crop(resize=SIZE * 8 // 7, crop=SIZE), on="image"))

# The model: yours.
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 7, stride=4),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, len(train.class_names)),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
# A cosine over the fresh photographs, however many steps echoing makes of them.
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda _: (1 + math.cos(math.pi * min((train.epoch + train.progress) / EPOCHS, 1))) / 2,
)

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
    right = [model(pixels).argmax(1) == labels for pixels, labels in valid]
    model.train()
    return torch.cat(right).float().mean().item()


while train.epoch < EPOCHS:
    for pixels, labels in train:
        loss = nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if train.counts.steps % SAVE_EVERY == 0:
            save()
    save()
    print(f"epoch {train.epoch}: loss {loss:.3f}, accuracy {accuracy():.3f}")
