"""Video: train/CLASS/*.mp4 and valid/CLASS/*.mp4, of any length.

Whenever it was stopped, start it again: it continues after the last checkpoint.
"""

import io
import itertools
import os

import av
import numpy as np
import torch
from torch import nn

import stoker

EPOCHS = 30
BATCH = 16
FRAMES = 16  # that follow each other, for the network to see at once
SIZE = 112
LEARNING_RATE = 1e-3
SAVE_EVERY = 500  # steps
FILES = [".mp4", ".mkv", ".webm"]
device = "cuda" if torch.cuda.is_available() else "cpu"


# The data.
def clip(data, where):
    """Decode FRAMES of a film, at its beginning (where=0), at its end (1) or in between."""
    with av.open(io.BytesIO(data)) as film:
        video = film.streams.video[0]
        last_s = film.duration / av.time_base - FRAMES / video.average_rate
        first = (video.start_time or 0) + int(where * max(0, last_s) / video.time_base)
        film.seek(first, stream=video)  # to the key frame before it
        seen = (frame for frame in film.decode(video) if frame.pts >= first)
        pictures = [
            frame.to_ndarray(width=SIZE, height=SIZE, format="rgb24")
            for frame in itertools.islice(seen, FRAMES)
        ]
    pictures += pictures[-1:] * (FRAMES - len(pictures))  # the last one, in films that are short
    return np.stack(pictures)


def random_clip(data, rng):
    pictures = clip(data, rng.random())
    return pictures[:, :, ::-1] if rng.random() < 0.5 else pictures


def middle(data):
    return clip(data, 0.5)


def to_network(pictures):
    """uint8 [n, frames, height, width, 3] -> float32 [n, 3, frames, height, width], -1 to 1."""
    return pictures.permute(0, 4, 1, 2, 3) / 127.5 - 1


def ready(pipeline):
    return pipeline.batch(BATCH).to_torch(device).map(to_network, on="data")


train = stoker.from_folder("train", extensions=FILES, seed=0).shuffle()
train = ready(train.random_map(random_clip, on="data"))
valid = stoker.from_folder("valid", extensions=FILES, classes=train.class_names)
valid = ready(valid.map(middle, on="data"))

# The model: yours.
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv3d(3, 32, 5, stride=(1, 4, 4)),
    nn.ReLU(),
    nn.Conv3d(32, 64, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool3d(1),
    nn.Flatten(),
    nn.Linear(64, len(train.class_names)),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
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
    right = [model(films).argmax(1) == labels for films, labels in valid]
    model.train()
    return torch.cat(right).float().mean().item()


while train.epoch < EPOCHS:
    for films, labels in train:
        loss = nn.functional.cross_entropy(model(films), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if train.counts.steps % SAVE_EVERY == 0:
            save()
    save()
    print(f"epoch {train.epoch}: loss {loss:.3f}, accuracy {accuracy():.3f}")
