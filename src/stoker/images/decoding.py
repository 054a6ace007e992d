"""Decoding images (extra ``[images]``)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def decode(data: bytes) -> NDArray[np.uint8]:
    """Decode an encoded image with Pillow.

    Args:
        data: a whole image file: JPEG, PNG, or whatever Pillow reads.

    Returns:
        RGB ``uint8 [height, width, 3]``, an own writable array. Grey, palette, CMYK and
        transparent images are converted; 16-bit ones are scaled to 8 bits.

    Raises:
        ImportError: Pillow is missing.
        PIL.UnidentifiedImageError, OSError: the data is no image or is cut short.
    """
    Image = _pillow()
    with Image.open(io.BytesIO(data)) as image:
        if image.mode.startswith("I"):
            return _from_deep(np.asarray(image))
        if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
            image = image.convert("RGBA")  # Pillow warns of the way straight to RGB
        if image.mode != "RGB":
            image = image.convert("RGB")
        return np.array(image)


def _from_deep(grey: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale one 16-bit channel to three of 8 bits (Pillow's own conversion would clip)."""
    eight = np.clip(grey.astype(np.float64) / 257.0, 0, 255).round().astype(np.uint8)
    return np.repeat(eight[..., None], 3, axis=-1)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("decoding images needs Pillow: pip install 'stoker[images]'") from error
    return Image
