"""Fine-tuning on chats: a template, and a loss over the assistant's tokens alone.

chats.jsonl has lines {"messages": [{"role": "user", "content": "..."}, ...]}.
"""

import os

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from training import RANK, WORLD, Decoder, device, dist, fit, next_token_loss, nn

import stoker
from stoker.collate import pad

STEPS = 2_000
SAVE_EVERY = 100  # steps
BATCH = 32  # chats, over all ranks
LENGTH = 1_024  # longer chats are cut
VOCABULARY = 4_096
WIDTH = 256
LAYERS = 4
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
END = "<|end|>"

# The data.
chats = stoker.from_jsonl("chats.jsonl", seed=0)


def learn():
    """Make a tokenizer of the chats: yours has learned from more."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*ROLES.values(), END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    alone = chats.shard(rank=0, world_size=1)
    texts = (message["content"] for chat in alone for message in chat["messages"])
    made.train_from_iterator(texts, trainer)
    made.save("tokenizer.json")


if RANK == 0 and not os.path.exists("tokenizer.json"):
    learn()
dist.barrier()
tokenizer = Tokenizer.from_file("tokenizer.json")


def encode(chat):
    """Apply the template: of each message the role, the content and an end."""
    tokens, labels = [], []
    for message in chat["messages"]:
        role = tokenizer.encode(ROLES[message["role"]]).ids
        said = tokenizer.encode(message["content"] + END).ids
        tokens += role + said
        is_learned = message["role"] == "assistant"
        labels += [-100] * len(role) + (said if is_learned else [-100] * len(said))
    return {"tokens": np.array(tokens[:LENGTH]), "labels": np.array(labels[:LENGTH])}


train = (
    chats.shuffle()
    .shard()
    .map(encode)
    .batch(BATCH // WORLD, drop_last=True, collate=pad({"tokens": 0, "labels": -100}))
    .repeat()
    .steps(SAVE_EVERY)
    .to_torch(device)
)


# The model: yours.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(VOCABULARY, WIDTH, LAYERS, LENGTH)

    def forward(self, batch):
        tokens, labels = batch["tokens"].values, batch["labels"].values
        return next_token_loss(self.decoder(self.decoder.embed(tokens)), labels)


fit(Model(), train, STEPS)
