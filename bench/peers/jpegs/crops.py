"""A random resized crop by OpenCV, for peers that leave decoding to the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from serve_jpegs import SIDE, box

cv2.setNumThreads(0)


def decoded(data: bytes | memoryview, by: str = "simplejpeg") -> Any:
    """Return ``uint8 [height, width, 3]`` of a JPEG; of other files by OpenCV, and where ``by`` is
    "opencv"."""
    if by == "opencv" or data[:2] != b"\xff\xd8":
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    import simplejpeg

    return simplejpeg.decode_jpeg(data, "RGB")


def cropped(data: bytes | memoryview, uniform: Callable[[], float], by: str = "simplejpeg") -> Any:
    """Return ``uint8 [SIDE, SIDE, 3]`` of a file, half of them flipped."""
    image = decoded(data, by)
    top, left, height, width = box(*image.shape[:2], uniform)
    cut = image[top : top + height, left : left + width]
    made = cv2.resize(cut, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(made, 1) if uniform() < 0.5 else made
