"""Pre-training: documents of two sources, mixed by tokens and packed.

web-*.bin are uint16 tokens, in which END ends a document; books.idx and books.bin are Megatron's.
"""

from training import WORLD, LanguageModel, device, fit

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
web = stoker.from_tokens("web-*.bin", dtype="uint16", separator=END).shuffle()
books = stoker.from_tokens("books.idx").shuffle()
train = (
    stoker.mix([web, books], weights=[0.7, 0.3], by=len, stop="all", seed=0)
    .shard()
    .pack(LENGTH)
    .batch(BATCH // WORLD, drop_last=True)
    .repeat()  # pass after pass
    .steps(SAVE_EVERY)  # the batches of one `for` loop
    .to_torch(device)
)

fit(LanguageModel(VOCABULARY, WIDTH, LAYERS, LENGTH), train, STEPS)
