"""JPEGs of every kind, and what Pillow makes of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FOLDER = Path(__file__).parent / "jpegs"
FILES = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.jpg"))}
"""What Pillow cannot write: odd subsampling, arithmetic coding, restarts, RGB. All 77 x 101."""


def photograph(height: int, width: int) -> np.ndarray:
    """Smooth colours, and some noise."""
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / 7 + y / 11), 128 + 90 * np.cos(x / 5 - y / 13), 3 * x + 5 * y]
    noise = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    return (np.stack(waves, -1) % 256 + noise).clip(0, 255).astype(np.uint8)


def saved(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


def encoded(rows: np.ndarray, kind: str = "JPEG", mode: str = "RGB", **how: Any) -> bytes:
    return saved(Image.fromarray(rows).convert(mode), kind, **how)


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert("RGB"))


def resized_by_pillow(rows: np.ndarray, box: tuple[int, int, int, int], size: Any) -> np.ndarray:
    """A box (top, left, height, width) of an image, in another size (height, width)."""
    top, left, height, width = box
    cut = Image.fromarray(rows[top : top + height, left : left + width])
    return np.array(cut.resize((size[1], size[0]), Image.Resampling.BILINEAR))


def levels_apart(one: np.ndarray, other: np.ndarray) -> int:
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other).max())


KINDS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 2},
    "grey": {"mode": "L"},
    "cmyk": {"mode": "CMYK"},
    "cmyk, progressive": {"mode": "CMYK", "progressive": True},
}
"""What Pillow can write, by what to tell ``encoded``."""
