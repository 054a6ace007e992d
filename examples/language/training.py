"""What these recipes share: ranks, a small language model, and a loop with checkpoints.

Replace all of it with your own: nothing here is about data, but for `"train": train`.
"""

import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Decoder(nn.Module):
    """A causal transformer: embedded tokens [n, length, width] -> logits.

    With `segments` [n, length] a token attends to those of its own segment alone.
    """

    def __init__(self, vocabulary, width, layers, length):
        super().__init__()
        self.heads = max(1, width // 64)
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, self.heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, hidden, segments=None, positions=None):
        length = hidden.shape[1]
        places = torch.arange(length, device=device)
        hidden = hidden + self.place(places if positions is None else positions)
        mask = places[:, None] < places
        if segments is not None:
            other = segments[:, :, None] != segments[:, None, :]
            mask = (mask | other).repeat_interleave(self.heads, 0)
        return self.head(self.layers(hidden, mask=mask))


def next_token_loss(logits, labels):
    """Return the mean loss; labels are the tokens, or -100 for those that are not learned."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class LanguageModel(nn.Module):
    """A model of packed sequences, in which no token is a target of another document."""

    def __init__(self, vocabulary, width, layers, length):
        super().__init__()
        self.decoder = Decoder(vocabulary, width, layers, length)

    def forward(self, batch):
        tokens, segments, positions = batch
        logits = self.decoder(self.decoder.embed(tokens), segments, positions)
        return next_token_loss(logits, torch.where(positions > 0, tokens, -100))


def fit(model, train, steps):
    """Train a model that returns its loss; save after each `for` loop, continue from what is saved.

    As many ranks as there are now load what any number of ranks saved.
    """
    _fit(nn.parallel.DistributedDataParallel(model.to(device)), train, steps)
    dist.destroy_process_group()  # after the model's end: gloo may hang if it ends first


def _fit(model, train, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved = sorted(glob.glob("checkpoint-*/.metadata"))  # which is written last
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        parts = {"model": weights, "optimizer": moments, "train": train}
        dcp.load(parts, checkpoint_id=os.path.dirname(saved[-1]))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    while train.counts.steps < steps:
        for batch in train:
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        parts = {"model": weights, "optimizer": moments, "train": train}
        dcp.save(parts, checkpoint_id=f"checkpoint-{train.counts.steps:09}")
        if RANK == 0:
            print(f"step {train.counts.steps}: loss {loss.item():.3f}", flush=True)
