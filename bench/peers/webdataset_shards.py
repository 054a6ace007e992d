"""WebDataset's reader over tar shards of small JPEGs, as its documentation has it. See sources.py.

``python webdataset_shards.py SHARDS BATCH WORKERS`` tells how many classes a batch has, on
average, then answers as ``serve.py`` does.
"""

from __future__ import annotations

import io
import sys
from importlib import metadata
from typing import Any

import numpy as np
import webdataset
from PIL import Image
from serve import serve


def decoded(data: bytes) -> Any:
    """Decode a file as sources.py does."""
    return np.asarray(Image.open(io.BytesIO(data)))


def main() -> None:
    shards, batch, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=100, detshuffle=False)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(decoded, int)
        .batched(batch)
    )
    loader = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=True
    )
    classes = float(np.mean([len(set(map(int, labels))) for _, labels in loader]))
    serve({"version": metadata.version("webdataset"), "classes": classes}, lambda: loader)


if __name__ == "__main__":
    main()
