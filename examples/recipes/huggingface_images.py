"""Images of a Hugging Face dataset: the columns `image` and `label`.

Whenever it was stopped, start it again: it continues after the last checkpoint.
"""

import os

import datasets
import torch
from torch import nn

import stoker
from stoker import images

EPOCHS = 30
BATCH = 128
SIZE = 224
SAVE_EVERY = 500  # steps
device = "cuda" if torch.cuda.is_available() else "cpu"

# The data.
pets = datasets.load_from_disk("pets")  # or load_dataset("timm/oxford-iiit-pet")


def ready(pipeline):
    batches = pipeline.batch(BATCH).to_torch(device)
    return batches.map(images.to_chw, on="image").map(images.normalize(), on="image")


train = ready(
    stoker.from_huggingface(pets["train"].select_columns(["image", "label"]), seed=0)
    .shuffle()
    .random_map(images.random_resized_crop(SIZE, flip_p=0.5), on="image")
)
test = stoker.from_huggingface(pets["test"].select_columns(["image", "label"]))
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
    right = [model(batch["image"]).argmax(1) == batch["label"] for batch in valid]
    model.train()
    return torch.cat(right).float().mean().item()


while train.epoch < EPOCHS:
    for batch in train:
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if train.counts.steps % SAVE_EVERY == 0:
            save()
    save()
    print(f"epoch {train.epoch}: loss {loss:.3f}, accuracy {accuracy():.3f}")
