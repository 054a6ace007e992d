"""Preference pairs: direct preference optimisation (DPO) on batches of about equal work.

pairs.jsonl has lines {"prompt": "...", "chosen": "...", "rejected": "..."}.
"""

import copy

import numpy as np
import torch
from training import Decoder, device, fit, nn

import stoker
from stoker.collate import pad

STEPS = 2_000
SAVE_EVERY = 100  # steps
TOKENS = 8_192  # in a batch of each rank: pairs times the longest, with padding
LENGTH = 1_024  # of prompt and answer; longer ones are cut
VOCABULARY = 257  # bytes, and the end of an answer
WIDTH = 256
LAYERS = 4
BETA = 0.1


# The data.
def encode(text):
    """Make tokens of a text: the bytes, where yours is a tokenizer."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def pair(row):
    """Return prompts with answers, and where the answers begin."""
    prompt = encode(row["prompt"])
    answers = [np.append(encode(row[which]), 256) for which in ("chosen", "rejected")]
    chosen, rejected = (np.concatenate([prompt, answer])[:LENGTH] for answer in answers)
    return {"chosen": chosen, "rejected": rejected, "start": len(prompt)}


def longer(row):
    return max(len(row["chosen"]), len(row["rejected"]))


train = (
    stoker.from_jsonl("pairs.jsonl", seed=0)
    .shuffle()
    .shard()
    .map(pair)
    .batch_by_tokens(TOKENS, longer, collate=pad(0, on=["chosen", "rejected"]))
    .repeat()
    .steps(SAVE_EVERY)
    .to_torch(device)
)


# The model: yours.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(VOCABULARY, WIDTH, LAYERS, LENGTH)
        self.reference = copy.deepcopy(self.decoder).requires_grad_(False)  # as it was

    def forward(self, batch):
        ours, before = (
            log_likelihood(model, batch["chosen"], batch["start"])
            - log_likelihood(model, batch["rejected"], batch["start"])
            for model in (self.decoder, self.reference)
        )
        return -nn.functional.logsigmoid(BETA * (ours - before)).mean()


def log_likelihood(model, answers, start):
    """Return the sum of the log-probabilities of each answer's tokens."""
    tokens = answers.values
    each = model(model.embed(tokens[:, :-1])).log_softmax(-1)
    each = each.gather(-1, tokens[:, 1:, None])[:, :, 0]
    places = torch.arange(1, tokens.shape[1], device=device)
    is_answer = (places >= start[:, None]) & (places < answers.lengths[:, None])
    return (each * is_answer).sum(1)


fit(Model(), train, STEPS)
