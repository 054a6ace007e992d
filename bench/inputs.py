"""What several benchmarks are given: photographs as JPEGs, and code that keeps the GIL busy."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image


def spin(iterations: int) -> int:
    """Keep the GIL busy."""
    total = 0
    for i in range(iterations):
        total += i & 3
    return total


def iterations_for(seconds: float) -> int:
    """Find how many iterations take so long, at the best of many tries."""
    tries = []
    for _ in range(50):
        began = time.perf_counter()
        spin(10_000)
        tries.append(time.perf_counter() - began)
    return round(10_000 * seconds / min(tries))


def jpegs(place: str | None, count: int) -> list[bytes]:
    """Read JPEGs from a folder or a tar, or make some."""
    if place is None:
        return list(made_jpegs(count))
    path = Path(place)
    if path.is_dir():
        return [f.read_bytes() for f in sorted(path.rglob("*")) if _is_jpeg(f.name)]
    with tarfile.open(path) as tar:
        opened = (tar.extractfile(member) for member in tar if _is_jpeg(member.name))
        return [file.read() for file in opened if file is not None]


def made_jpegs(count: int, size: tuple[int, int] = (500, 375)) -> Iterator[bytes]:
    """Make smooth noise, ``size`` wide and high."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        small = generator.integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(small).resize(size).save(out, "JPEG", quality=90)
        yield out.getvalue()


def _is_jpeg(name: str) -> bool:
    return name.lower().endswith((".jpg", ".jpeg"))
