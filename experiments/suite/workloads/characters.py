"""Characters of wikitext-2: the next one is told by a one-layer transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.suite.workload import Recipe
from experiments.suite.workloads.text import Text, texts


class Characters(Text):
    """Windows of 48 characters, with a random offset as augmentation."""

    name = "characters"
    title = "characters of wikitext-2, random offset; one-layer transformer, AdamW"
    recipe = Recipe(batch_size=16, budget_fresh=6_400, learning_rates=(0.002, 0.005, 0.0125))
    window = 48
    vocabulary = 256
    width = 64

    def symbols(self, folder: Path | None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return characters by their Latin-1 code, others as a question mark."""
        if folder is None:
            made_up = np.frombuffer(b"what is made up repeats itself. " * 2_000, np.uint8)
            return made_up, made_up[:4_000]
        train, test = (
            np.frombuffer(text.encode("latin-1", "replace"), np.uint8) for text in texts(folder)
        )
        return train, test


WORKLOAD = Characters
