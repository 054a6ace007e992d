"""Packs documents of given lengths with a peer, in its environment; prints the number of sequences.

python pack_lengths.py grain|trl LENGTHS.npy LENGTH BINS
"""

from __future__ import annotations

import sys

import numpy as np


def grain_sequences(sizes: list[int], length: int, bins: int) -> int:
    """Pack with Grain's best fit, into so many open bins."""
    import grain

    documents = [{"tokens": np.ones(size, np.int32)} for size in sizes]
    packed = grain.experimental.BestFitPackIterDataset(
        grain.MapDataset.source(documents).to_iter_dataset(),
        length_struct={"tokens": length},
        num_packing_bins=bins,
    )
    return sum(1 for _ in packed)


def trl_sequences(sizes: list[int], length: int, _: int) -> int:
    """Pack with TRL's best fit decreasing, of a thousand documents at once, as it comes."""
    import datasets
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    documents = datasets.Dataset.from_dict({"input_ids": [[1] * size for size in sizes]})
    return len(pack_dataset(documents, length, "bfd"))


if __name__ == "__main__":
    _, peer, path, length, bins = sys.argv
    count = {"grain": grain_sequences, "trl": trl_sequences}[peer]
    print("sequences:", count(np.load(path).tolist(), int(length), int(bins)))
