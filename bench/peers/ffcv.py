"""FFCV: its own file, mapped from memory, decoded by compiled code into batches.

Building it needs Debian's libopencv-dev, libturbojpeg0-dev and pkg-config.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ffcv.fields import IntField, NDArrayField
from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.writer import DatasetWriter

PACKAGE = "ffcv"


class _Rows:
    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], int(self.labels[index])


def epochs(
    images: Any, labels: Any, batch: int, workers: int
) -> Callable[[], Iterable[tuple[Any, Any]]]:
    folder = tempfile.mkdtemp(prefix="ffcv-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = str(Path(folder, "rows.beton"))
    fields = {"image": NDArrayField(images.dtype, images.shape[1:]), "label": IntField()}
    DatasetWriter(file, fields, num_workers=workers).from_indexed_dataset(_Rows(images, labels))
    loader = Loader(
        file,
        batch_size=batch,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"image": [NDArrayDecoder()], "label": [IntDecoder()]},
    )
    return lambda: loader
