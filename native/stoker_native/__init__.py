"""JPEG crops, resampling, PNGs, pixel tables, rows of arrays and windows of tokens, in C.

Users call ``stoker.images``, ``stoker.from_tokens`` and others, which call these functions. NumPy
allocates all results. Calls release the GIL, but for ``jpeg_size`` and ``png_size``, which take a
few microseconds.
"""

from __future__ import annotations

from stoker_native.functions import (
    Crop,
    Drawing,
    TooLarge,
    crop_many,
    jpeg_crop,
    jpeg_decode,
    jpeg_size,
    last_path,
    look_up_pixels,
    paths,
    pixels_crop,
    png_decode,
    png_size,
    random_crops,
    read_files,
    read_windows,
    use_path,
)
from stoker_native.rows import copy_rows, gather_rows
from stoker_native.version import __version__

__all__ = [
    "Crop",
    "Drawing",
    "TooLarge",
    "__version__",
    "copy_rows",
    "crop_many",
    "gather_rows",
    "jpeg_crop",
    "jpeg_decode",
    "jpeg_size",
    "last_path",
    "look_up_pixels",
    "paths",
    "pixels_crop",
    "png_decode",
    "png_size",
    "random_crops",
    "read_files",
    "read_windows",
    "use_path",
]
