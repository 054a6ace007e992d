"""Pre-training from an object store: rows of text in Parquet, read by blocks and packed.

Each rank reads row groups of its own, whole, and mixes the rows of sixteen at a time.
"""

import numpy as np
from training import WORLD, LanguageModel, device, fit

import stoker

CORPUS = "s3://bucket/corpus/"  # with a column `text`
STEPS = 20_000
SAVE_EVERY = 500  # steps
BATCH = 64  # sequences, over all ranks
LENGTH = 1_024
VOCABULARY = 257  # bytes, and the end of a text
WIDTH = 384
LAYERS = 6


# The data.
def encode(row):
    """Make tokens of a text: the bytes, where yours is a tokenizer."""
    return np.append(np.frombuffer(row["text"].encode(), np.uint8).astype(np.int64), 256)


train = (
    stoker.from_parquet(CORPUS, ["text"], seed=0)
    .shuffle(block=True)
    .shard()
    .map(encode)
    .pack(LENGTH)
    .batch(BATCH // WORLD, drop_last=True)
    .repeat()
    .steps(SAVE_EVERY)
    .to_torch(device)
)

fit(LanguageModel(VOCABULARY, WIDTH, LAYERS, LENGTH), train, STEPS)
