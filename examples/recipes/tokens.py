"""Tokens: train-*.bin and valid.bin, files of uint16 tokens one after another.

Whenever it was stopped, start it again: it continues after the last checkpoint.
"""

import os

import torch
from torch import nn

import stoker

STEPS = 20_000
VALIDATE_EVERY = 1_000  # steps
SAVE_EVERY = 200
BATCH = 64
LENGTH = 512
VOCABULARY = 50_304
WIDTH = 384
LAYERS = 6
device = "cuda" if torch.cuda.is_available() else "cpu"

# The data.
train = (
    stoker.from_tokens("train-*.bin", LENGTH, dtype="uint16", seed=0)
    .shuffle()
    .batch(BATCH, drop_last=True)
    .repeat()  # pass after pass
    .steps(VALIDATE_EVERY)  # the batches of one `for` loop
    .to_torch(device)
)
valid = stoker.from_tokens("valid.bin", LENGTH, dtype="uint16").batch(BATCH).to_torch(device)


# The model: yours.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // 64, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=inputs.device)
        hidden = self.layers(self.embed(inputs) + self.place, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=1e-3, total_steps=STEPS, pct_start=0.05
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
def valid_loss():
    model.eval()
    losses = [(model(inputs, targets) * len(inputs), len(inputs)) for inputs, targets in valid]
    model.train()
    return sum(loss for loss, _ in losses).item() / sum(rows for _, rows in losses)


while train.counts.steps < STEPS:
    for inputs, targets in train:
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if train.counts.steps % SAVE_EVERY == 0:
            save()
    save()
    print(f"step {train.counts.steps}: loss {loss:.3f}, valid {valid_loss():.3f}")
