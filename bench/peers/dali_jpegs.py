"""DALI on CPU over JPEG files: read, decode, crop; prints what each epoch took. See cache_jpegs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from nvidia.dali import fn, pipeline_def, types


def _read(device_stat: str) -> int:
    return int(Path(device_stat).read_text().split()[2]) * 512


def main(folder: str, device_stat: str, count: int, crop: int, batch: int, workers: int) -> None:
    @pipeline_def(batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=2)
    def pipeline() -> Any:
        # DALI's defaults shuffle through a buffer; all at once, anew each epoch, is the same order
        # of reading as the others have.
        jpegs, labels = fn.readers.file(
            file_root=folder, shuffle_after_epoch=True, name="files", dont_use_mmap=True
        )
        images = fn.decoders.image(jpegs, device="cpu", output_type=types.RGB)
        images = fn.crop(
            images,
            crop=(crop, crop),
            crop_pos_x=fn.random.uniform(range=(0.0, 1.0)),
            crop_pos_y=fn.random.uniform(range=(0.0, 1.0)),
            out_of_bounds_policy="pad",
        )
        return images, labels

    built = pipeline()
    built.build()
    size = built.epoch_size("files")
    rows = []
    total = 0
    for _ in range(count):
        before, began = _read(device_stat), time.perf_counter()
        seen = 0
        while seen < size:
            images, _labels = built.run()
            total += int(images.as_array().shape[0])
            seen += batch
        rows.append(
            {"epoch_s": time.perf_counter() - began, "read_bytes": _read(device_stat) - before}
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(argument) for argument in sys.argv[3:7]))
