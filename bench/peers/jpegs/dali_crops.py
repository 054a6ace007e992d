"""DALI on the CPU over image files: decodes the box of a random crop alone, resizes antialiased."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nvidia.dali import fn, pipeline_def, types
from serve_jpegs import SIDE


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    @pipeline_def(batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=2)
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            file_root=folder, shuffle_after_epoch=True, name="files", pad_last_batch=False
        )
        images = fn.decoders.image_random_crop(
            files,
            device="cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        images = fn.resize(
            images, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR, antialias=True
        )
        images = fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))
        return images, labels

    built = pipeline()
    built.build()
    batches = built.epoch_size("files") // batch

    def epoch() -> Iterator[Any]:
        for _ in range(batches):
            images, labels = built.run()
            yield images.as_array(), labels.as_array()

    return epoch
