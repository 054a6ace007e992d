"""A random resized crop by simplejpeg and OpenCV, for peers that leave decoding to the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import simplejpeg
from serve_jpegs import SIDE, box

cv2.setNumThreads(0)


def cropped(data: bytes, uniform: Callable[[], float]) -> Any:
    """Return ``uint8 [SIDE, SIDE, 3]`` of a JPEG, half of them flipped."""
    image = simplejpeg.decode_jpeg(data, "RGB")
    top, left, height, width = box(*image.shape[:2], uniform)
    cut = image[top : top + height, left : left + width]
    made = cv2.resize(cut, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(made, 1) if uniform() < 0.5 else made
