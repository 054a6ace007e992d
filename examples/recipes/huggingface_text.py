"""Text of a Hugging Face dataset: the columns `text` and `label`, and a tokenizer.

Whenever it was stopped, start it again: it continues after the last checkpoint.
"""

import os

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

import stoker

EPOCHS = 3
BATCH = 64
LENGTH = 512  # longer texts are cut
WIDTH = 256
SAVE_EVERY = 500  # steps
device = "cuda" if torch.cuda.is_available() else "cpu"

# The data.
reviews = datasets.load_from_disk("reviews")  # or load_dataset("stanfordnlp/imdb")
tokenizer = Tokenizer.from_file("tokenizer.json")  # or from_pretrained("bert-base-uncased")
tokenizer.enable_truncation(LENGTH)


def encode(text):
    return np.array(tokenizer.encode(text).ids)


def ready(pipeline):
    padded = stoker.collate.pad(0, on="text")
    return pipeline.map(encode, on="text").batch(BATCH, collate=padded).to_torch(device)


train = ready(stoker.from_huggingface(reviews["train"], seed=0).shuffle())
valid = ready(stoker.from_huggingface(reviews["test"]))


# The model: yours.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(tokenizer.get_vocab_size(), WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, len(train.class_names))

    def forward(self, text):
        is_padding = torch.arange(text.values.shape[1], device=device) >= text.lengths[:, None]
        hidden = self.layer(self.embed(text.values), src_key_padding_mask=is_padding)
        hidden = hidden.masked_fill(is_padding[:, :, None], 0)
        return self.head(hidden.sum(1) / text.lengths[:, None])


torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, EPOCHS * len(train))

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
    right = [model(batch["text"]).argmax(1) == batch["label"] for batch in valid]
    model.train()
    return torch.cat(right).float().mean().item()


while train.epoch < EPOCHS:
    for batch in train:
        loss = nn.functional.cross_entropy(model(batch["text"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if train.counts.steps % SAVE_EVERY == 0:
            save()
    save()
    print(f"epoch {train.epoch}: loss {loss:.3f}, accuracy {accuracy():.3f}")
