"""JPEG crops, resampling, PNGs, pixel tables, rows of arrays and windows of tokens, in C.

Users call ``stoker.images``, ``stoker.from_tokens`` and others, which call these functions. NumPy
allocates all memory. Calls release the GIL, but for ``jpeg_size``, which takes a few microseconds.
"""

from __future__ import annotations

from stoker_native.functions import (
    Crop,
    TooLarge,
    jpeg_crop,
    jpeg_crop_many,
    jpeg_decode,
    jpeg_size,
    last_path,
    look_up_pixels,
    paths,
    pixels_crop,
    read_files,
    read_windows,
    use_path,
)
from stoker_native.png import png_decode
from stoker_native.rows import copy_rows, copy_runs, gather_items, gather_rows
from stoker_native.version import __version__

__all__ = [
    "Crop",
    "TooLarge",
    "__version__",
    "copy_rows",
    "copy_runs",
    "gather_items",
    "gather_rows",
    "jpeg_crop",
    "jpeg_crop_many",
    "jpeg_decode",
    "jpeg_size",
    "last_path",
    "look_up_pixels",
    "paths",
    "pixels_crop",
    "png_decode",
    "read_files",
    "read_windows",
    "use_path",
]
