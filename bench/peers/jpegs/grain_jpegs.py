"""Grain over image files: simplejpeg decodes in full, OpenCV resizes (the two nearest pixels).

simplejpeg is libjpeg-turbo without a GIL; PNGs are OpenCV's. In threads: processes
(``mp_prefetch``) are slower here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cv2
import grain
import numpy as np
import simplejpeg
from serve_jpegs import SIDE, box, files_of


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    cv2.setNumThreads(0)
    files = files_of(folder)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=4 * batch)
    seeds = np.random.default_rng()

    def crop(at: Any, rng: np.random.Generator) -> tuple[Any, int]:
        path, label = files[at]
        data = Path(path).read_bytes()
        if path.endswith(".jpg"):
            image = simplejpeg.decode_jpeg(data, "RGB")
        else:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        top, left, height, width = box(*image.shape[:2], rng.random)
        made = cv2.resize(image[top : top + height, left : left + width], (SIDE, SIDE))
        return cv2.flip(made, 1) if rng.random() < 0.5 else made, label

    def epoch() -> Iterable[Any]:
        rows = grain.MapDataset.range(len(files)).seed(int(seeds.integers(1 << 31))).shuffle()
        return rows.random_map(crop).to_iter_dataset(options).batch(batch, drop_remainder=True)

    return epoch
