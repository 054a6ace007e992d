"""Pre-training: documents of two sources, mixed by tokens and packed.

web-*.bin are uint16 tokens, in which END ends a document; books.idx and books.bin are Megatron's.
"""

import numpy as np
from training import WORLD, Decoder, device, fit, next_token_loss, nn

import stoker

STEPS = 20_000
SAVE_EVERY = 500  # steps
BATCH = 64  # sequences, over all ranks
LENGTH = 1_024
VOCABULARY = 50_304
END = 50_256
WIDTH = 384
LAYERS = 6


# The data.
def shifted(row):
    """Leave out of the loss what would be the first token of another document."""
    is_inside = row.segments[1:] == row.segments[:-1]
    targets = np.where(is_inside, row.tokens[1:], -100)
    return row.tokens[:-1], targets, row.segments[:-1], row.positions[:-1]


web = stoker.from_tokens("web-*.bin", dtype="uint16", separator=END).shuffle()
books = stoker.from_tokens("books.idx").shuffle()
train = (
    stoker.mix([web, books], weights=[0.7, 0.3], by=len, stop="all", seed=0)
    .shard()
    .pack(LENGTH + 1)
    .map(shifted)
    .batch(BATCH // WORLD, drop_last=True)
    .repeat()  # pass after pass
    .steps(SAVE_EVERY)  # the batches of one `for` loop
    .to_torch(device)
)


# The model: yours.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(VOCABULARY, WIDTH, LAYERS, LENGTH)

    def forward(self, batch):
        tokens, targets, segments, positions = batch
        logits = self.decoder(self.decoder.embed(tokens), segments, positions)
        return next_token_loss(logits, targets)


fit(Model(), train, STEPS)
