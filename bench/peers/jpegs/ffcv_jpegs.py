"""FFCV: its own file of the photographs, cropped, resized and flipped by compiled code in threads.

Its writer takes pixels, and encodes them anew, with a quality of 90.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip
from ffcv.writer import DatasetWriter
from PIL import Image
from serve_jpegs import SIDE, files_of


class _Files:
    def __init__(self, files: list[tuple[str, int]]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self._files[index]
        return Image.open(path), label


def epochs(folder: str, variant: str, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    place = tempfile.mkdtemp(prefix="ffcv-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    file = str(Path(place, "photographs.beton"))
    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    DatasetWriter(file, fields, num_workers=workers).from_indexed_dataset(_Files(files_of(folder)))
    crop = RandomResizedCropRGBImageDecoder((SIDE, SIDE))
    loader = Loader(
        file,
        batch_size=batch,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": [crop, RandomHorizontalFlip()], "label": [IntDecoder()]},
    )
    return lambda: loader
