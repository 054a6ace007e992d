"""Words of wikitext-2: the next one is told by a one-layer transformer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.suite.workload import Recipe
from experiments.suite.workloads.text import Text, texts

_END_OF_LINE = "<eos>"


class Words(Text):
    """Windows of 32 words of the 1,023 most frequent ones, with a random offset as augmentation."""

    name = "words"
    title = "words of wikitext-2, random offset; one-layer transformer, AdamW"
    recipe = Recipe(batch_size=16, budget_fresh=4_800, learning_rates=(0.002, 0.005, 0.0125))
    window = 32
    vocabulary = 1_024
    width = 64
    tested_windows = 192

    def symbols(self, folder: Path | None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return words by their place among the most frequent ones, all others as 0."""
        if folder is None:
            train = test = "what is made up repeats itself again \n" * 3_000
            test = test[:40_000]
        else:
            train, test = texts(folder)
        split = [text.replace("\n", f" {_END_OF_LINE} ").split() for text in (train, test)]
        frequent = Counter(split[0]).most_common(self.vocabulary - 1)
        numbers = {word: number for number, (word, _) in enumerate(frequent, start=1)}
        first, second = (
            np.fromiter((numbers.get(word, 0) for word in words), np.int16, len(words))
            for words in split
        )
        return first, second


WORKLOAD = Words
