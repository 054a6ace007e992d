"""JPEG crops and resampling in C. NumPy allocates, and the GIL is released during every call.

``stoker.images`` is what users call; this is what it calls.
"""

from __future__ import annotations

from stoker_native.functions import (
    Crop,
    TooLarge,
    jpeg_crop,
    jpeg_decode,
    jpeg_size,
    last_path,
    paths,
    pixels_crop,
    read_windows,
    use_path,
)
from stoker_native.version import __version__

__all__ = [
    "Crop",
    "TooLarge",
    "__version__",
    "jpeg_crop",
    "jpeg_decode",
    "jpeg_size",
    "last_path",
    "paths",
    "pixels_crop",
    "read_windows",
    "use_path",
]
