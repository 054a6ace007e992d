"""Mutated JPEGs, cropped by every path: exceptions only. test_native_jpegs.py runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import stoker_native as native
from encoded_images import FILES, KINDS, encoded, photograph

LIMITS = {"max_pixels": 2_000_000, "max_scan_pixels": 20_000_000}


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Change some bytes, often near the beginning, where the tables are; or cut, or repeat."""
    changed = bytearray(data)
    kind = rng.integers(8)
    if kind == 0:
        del changed[int(rng.integers(len(changed))) :]
    elif kind == 1:
        first, last = sorted(rng.integers(len(changed), size=2))
        changed[int(last) : int(last)] = changed[int(first) : int(last)]
    else:
        within = 200 if kind < 4 else len(changed)
        for at in rng.integers(min(within, len(changed)), size=int(rng.integers(1, 9))):
            changed[int(at)] = int(rng.integers(256))
    return bytes(changed)


def calls(data: bytes, rng: np.random.Generator) -> Iterator[Callable[[], object]]:
    """What is tried with a file: a crop of it, a part of it, and a crop of other pixels."""
    height, width = native.jpeg_size(data)
    top, left = int(rng.integers(height)), int(rng.integers(width))
    tall = int(rng.integers(1, min(height - top, 500) + 1))
    wide = int(rng.integers(1, min(width - left, 500) + 1))
    out = (int(rng.integers(1, 60)), int(rng.integers(1, 60)))
    flags = (rng.integers(2, size=4) > 0).tolist()
    crop = native.Crop(left, top, wide, tall, *out, *flags)
    yield lambda: native.jpeg_crop(data, crop, **LIMITS)
    odd_crop = native.Crop(*odd_box(height, width, rng), *out, *flags)
    yield lambda: native.jpeg_crop(data, odd_crop, **LIMITS)
    yield lambda: native.jpeg_decode(data, (left, top, wide, tall), **LIMITS)
    channels = int(rng.integers(1, 5))
    pixels = rng.integers(0, 256, (min(height, 300), min(width, 300), channels), np.uint8)
    tall, wide = pixels.shape[0] - top, pixels.shape[1] - left
    if tall > 0 < wide:
        crop = native.Crop(left, top, wide, tall, *out, *flags)
        yield lambda: native.pixels_crop(pixels, crop)
    odd = native.Crop(*odd_box(pixels.shape[0], pixels.shape[1], rng), *out, *flags)
    yield lambda: native.pixels_crop(pixels, odd)


def odd_box(height: int, width: int, rng: np.random.Generator) -> tuple[float, ...]:
    """A box that need not begin or end between pixels, may be tiny, and need not be one."""

    def side(length: int) -> tuple[float, float]:
        sizes = [1e-300, 1e-9, 1e-6, 2e-6, 1e-3, 0.5, 1.0, length / 3, length, length + 1e-6]
        starts = [0.0, -1e-6, 0.5, length - 1e-7, length - 1.0, length, rng.random() * length]
        strange = [float("nan"), float("inf"), -1.0, 1e300]
        chosen = rng.choice(sizes) if rng.integers(20) else rng.choice(strange)
        return float(rng.choice(starts)), float(chosen)

    (x, wide), (y, tall) = side(width), side(height)
    return x, y, wide, tall


def main(count: int) -> None:
    rng = np.random.default_rng(count)
    sources = [*FILES.values(), *(encoded(photograph(40, 56), **how) for how in KINDS.values())]
    failed = 0
    ran = set()
    for number in range(count):
        data = mutated(sources[int(rng.integers(len(sources)))], rng)
        native.use_path(native.paths()[number % len(native.paths())])
        raised = False
        try:
            for call in calls(data, rng):
                try:
                    call()
                    ran.add(native.last_path())
                except (OSError, ValueError, MemoryError):
                    raised = True
        except OSError:  # no size
            raised = True
        failed += raised
    assert ran == set(native.paths()), ran
    assert 0 < failed < count
    print(f"{failed} of {count} files raised; paths {', '.join(sorted(ran))}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
