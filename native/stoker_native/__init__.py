"""JPEG crops, resampling, numbers of pixels, windows of tokens: in C.

NumPy allocates; every call releases the GIL.

``stoker.images`` and ``stoker.from_tokens`` are what users call; this is what they call.
"""

from __future__ import annotations

from stoker_native.functions import (
    Crop,
    TooLarge,
    jpeg_crop,
    jpeg_decode,
    jpeg_size,
    last_path,
    look_up_pixels,
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
    "look_up_pixels",
    "paths",
    "pixels_crop",
    "read_windows",
    "use_path",
]
