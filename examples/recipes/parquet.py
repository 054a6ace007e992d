"""Parquet in an object store: numbers in `features`, a `category`, and what was `clicked`.

Whenever it was stopped, start it again: it continues after the last checkpoint.
"""

import os

import torch
from torch import nn

import stoker

TRAIN = "s3://bucket/clicks/train/"  # credentials: those of the environment, or storage_options=
VALID = "s3://bucket/clicks/valid/"
COLUMNS = ["features", "category", "clicked"]  # no others are read
EPOCHS = 3
BATCH = 1024
CATEGORIES = 1_000
FEATURES = 16
SAVE_EVERY = 500  # steps
device = "cuda" if torch.cuda.is_available() else "cpu"

# The data.
train = stoker.from_parquet(TRAIN, COLUMNS, seed=0).shuffle().batch(BATCH).to_torch(device)
valid = stoker.from_parquet(VALID, COLUMNS).batch(BATCH).to_torch(device)


# The model: yours.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CATEGORIES, 16)
        self.layers = nn.Sequential(nn.Linear(16 + FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        known = torch.cat([self.embed(batch["category"]), batch["features"].float()], 1)
        return self.layers(known)[:, 0]


torch.manual_seed(0)
model = Model().to(device)
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
    right = [(model(batch) > 0) == (batch["clicked"] > 0) for batch in valid]
    return torch.cat(right).float().mean().item()


while train.epoch < EPOCHS:
    for batch in train:
        wanted = batch["clicked"].float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if train.counts.steps % SAVE_EVERY == 0:
            save()
    save()
    print(f"epoch {train.epoch}: loss {loss:.3f}, accuracy {accuracy():.3f}")
