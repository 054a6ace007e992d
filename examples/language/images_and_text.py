"""Images and text: a vision tower, and batches that count both.

captions.jsonl has lines {"image": "cat.png", "text": "..."}; images may have any size.
"""

import numpy as np
import torch
from PIL import Image
from training import Decoder, device, fit, next_token_loss, nn

import stoker
from stoker.collate import pad

STEPS = 2_000
SAVE_EVERY = 100  # steps
COST = 8_192  # tokens and patches in a batch of each rank
LENGTH = 1_024  # tokens of an image and its text
PATCH = 16  # pixels
VOCABULARY = 258  # bytes, the end, and the place of a patch
END, IMAGE = 256, 257
WIDTH = 256
LAYERS = 4


# The data.
def prepare(row):
    """Cut an image into patches [n, 3 * PATCH * PATCH]; a token stands for each in the text."""
    pixels = np.asarray(Image.open(row["image"]).convert("RGB"), np.float32) / 255
    down, across = (side // PATCH for side in pixels.shape[:2])
    grid = pixels[: down * PATCH, : across * PATCH].reshape(down, PATCH, across, PATCH, 3)
    patches = grid.swapaxes(1, 2).reshape(down * across, -1)
    text = np.frombuffer(row["text"].encode(), np.uint8)
    tokens = np.concatenate([np.full(len(patches), IMAGE), text, [END]])
    return {"tokens": tokens, "patches": patches}


def cost(example):
    """What the decoder and the tower compute for it."""
    return len(example["tokens"]) + len(example["patches"])


def collate(examples):
    """Pad tokens; put the patches of all images one after another, with their numbers."""
    patches = [example.pop("patches") for example in examples]
    lengths = np.array([len(each) for each in patches])
    padded = pad(END)(examples)["tokens"]
    return {"tokens": padded, "patches": np.concatenate(patches), "patch_lengths": lengths}


train = (
    stoker.from_jsonl("captions.jsonl", seed=0)
    .shuffle()
    .shard()
    .map(prepare)
    .batch_by_tokens(COST, cost, padded=False, collate=collate)
    .repeat()
    .steps(SAVE_EVERY)
    .to_torch(device)
)


# The model: yours.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(VOCABULARY, WIDTH, LAYERS, LENGTH)
        self.tower = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.attend = nn.TransformerEncoderLayer(WIDTH, 1, WIDTH, dropout=0.0, batch_first=True)

    def forward(self, batch):
        tokens, lengths = batch["tokens"].values, batch["patch_lengths"]
        images = torch.repeat_interleave(lengths)  # of which image each patch is
        other = images[:, None] != images
        seen = self.attend(self.tower(batch["patches"])[None], src_mask=other)[0]
        hidden = self.decoder.embed(tokens)
        hidden = hidden.masked_scatter((tokens == IMAGE)[:, :, None], seen)
        places = torch.arange(tokens.shape[1], device=device)
        is_text = (tokens != IMAGE) & (places < batch["tokens"].lengths[:, None])
        return next_token_loss(self.decoder(hidden), torch.where(is_text, tokens, -100))


fit(Model(), train, STEPS)
