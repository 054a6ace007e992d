"""DALI on the CPU, a pipeline in every job: read, decode, crop. See bench/share.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from consuming import consume
from nvidia.dali import fn, pipeline_def, types


def main(folder: str, batch: int, crop: int, warm: int, threads: int) -> None:
    @pipeline_def(batch_size=batch, num_threads=threads, device_id=None, prefetch_queue_depth=2)
    def pipeline() -> Any:
        jpegs, labels = fn.readers.file(file_root=folder, shuffle_after_epoch=True, name="files")
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

    def batches() -> Iterator[Any]:
        while True:
            images, labels = built.run()
            yield images.as_tensor(), labels.as_tensor()

    consume(batches, warm)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:6]))
