"""Grain over image files: simplejpeg decodes in full, OpenCV resizes (the two nearest pixels).

simplejpeg is libjpeg-turbo without a GIL; PNGs are OpenCV's. In threads: processes
(``mp_prefetch``) are slower here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grain
import numpy as np
from crops import cropped
from serve_jpegs import files_of


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    files = files_of(folder)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=4 * batch)
    seeds = np.random.default_rng()

    def crop(at: Any, rng: np.random.Generator) -> tuple[Any, int]:
        path, label = files[at]
        return cropped(Path(path).read_bytes(), rng.random), label

    def epoch() -> Iterable[Any]:
        rows = grain.MapDataset.range(len(files)).seed(int(seeds.integers(1 << 31))).shuffle()
        return rows.random_map(crop).to_iter_dataset(options).batch(batch, drop_remainder=True)

    return epoch
