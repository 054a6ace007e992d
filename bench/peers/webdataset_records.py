"""WebDataset's reader over tar shards, nothing decoded. See ../records.py.

``python webdataset_records.py SHARDS BATCH EPOCHS`` prints what each epoch took, as JSON.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from typing import Any

import webdataset

WORKERS = 2


def main() -> None:
    shards, batch, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    began = time.perf_counter()
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=100, detshuffle=False)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .batched(batch, collation_fn=list)
    )
    loader = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True
    )
    found: dict[str, Any] = {"build_s": time.perf_counter() - began, "epochs": []}
    for _ in range(epochs):
        examples, last = 0, (began := time.perf_counter())
        for each in loader:
            examples, last = examples + len(each), time.perf_counter()
        for path in glob.glob(os.path.join(os.path.dirname(shards), "*.tar")):  # of a disk
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        found["epochs"].append({"epoch_s": last - began, "examples": examples})
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
