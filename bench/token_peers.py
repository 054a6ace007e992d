"""Tokens for language models, beside peers: windows of a large file, and packed documents.

- windows: of 1,024 tokens, inputs and targets ``int64``, shuffled, batches of 64, from 20 million
  tokens.
- packed: 6,000 documents of 50 to 3,000 tokens, shuffled, joined to sequences of 2,049, batches
  of 8.

Command::

    python bench/token_peers.py --peers all --install

"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from harness import Report
from peers import row_races
from peers.row_races import Arm

TASKS = {
    "windows": {
        "stoker": Arm("", "stoker_rows"),
        "torch": Arm("", "torch_rows", "0"),
        "torch, 2 workers": Arm("", "torch_rows", "2"),
        "Hugging Face": Arm("huggingface", "huggingface_rows"),
        "Grain, array": Arm("grain", "grain_rows", "array"),
        "Grain, ArrayRecord": Arm("grain", "grain_rows", "records"),
        "tf.data": Arm("tensorflow", "tensorflow_rows"),
        "LitData": Arm("litdata", "litdata_rows"),
        "Streaming": Arm("streaming", "streaming_rows"),
        "Megatron": Arm("megatron", "megatron_rows"),
    },
    "packed": {
        "stoker": Arm("", "stoker_rows"),
        "torch": Arm("", "torch_rows", "0"),
        "torch, 2 workers": Arm("", "torch_rows", "2"),
        "Hugging Face, packed before": Arm("huggingface", "huggingface_rows"),
        "Grain, ConcatThenSplit": Arm("grain", "grain_rows"),
        "tf.data, rebatch": Arm("tensorflow", "tensorflow_rows"),
        "LitData, packed before": Arm("litdata", "litdata_rows"),
        "Megatron, GPTDataset": Arm("megatron", "megatron_rows"),
    },
}


def write(folder: Path, quick: bool) -> None:
    """Write tokens that tell which window or document they are of."""
    draw = np.random.default_rng(0)
    tokens, documents = (600_000, 400) if quick else (20_000_000, 6_000)
    lengths = draw.integers(50, 3_001, documents)
    for name, each in (
        ("windows", np.arange(tokens) // 1_024),
        ("packed", np.repeat(np.arange(documents) + 1, lengths)),
    ):
        (folder / name).mkdir()
        each.astype(np.uint16).tofile(folder / name / "tokens.bin")
    np.save(folder / "packed" / "ends.npy", np.cumsum(lengths))


def evaluate(made: Report) -> None:
    """Hold every arm against stoker."""
    row_races.show(made)


def main() -> None:
    row_races.run(__file__, __doc__, evaluate, TASKS, write)


if __name__ == "__main__":
    main()
