"""What examples/recipes/huggingface_text.py has from its pipelines, from a DataLoader."""

import datasets
import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

BATCH = 64
LENGTH = 512
WORKERS = 4

# The data.
reviews = datasets.load_from_disk("reviews")
tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.enable_truncation(LENGTH)


def padded(examples):
    texts = [torch.tensor(tokenizer.encode(each["text"]).ids) for each in examples]
    lengths = torch.tensor([len(text) for text in texts])
    labels = torch.tensor([each["label"] for each in examples])
    return pad_sequence(texts, batch_first=True), lengths, labels


train = StatefulDataLoader(
    reviews["train"],
    BATCH,
    shuffle=True,
    collate_fn=padded,
    num_workers=WORKERS,
    persistent_workers=True,
)
valid = DataLoader(reviews["test"], BATCH, collate_fn=padded, num_workers=WORKERS)
