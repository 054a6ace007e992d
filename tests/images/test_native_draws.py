"""Random crops in C: the boxes that Python draws, bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from encoded_images import encoded
from hypothesis import given
from hypothesis import strategies as st

from stoker.images import random_resized_crop
from stoker.schedule import rng

native = pytest.importorskip("stoker_native", reason="stoker-native is not built here")

NO_LIMITS = {"max_pixels": 1 << 40, "max_scan_pixels": 1 << 50}
sides = st.integers(1, 90)
addresses = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1))


def ranges(least: float, most: float) -> st.SearchStrategy[tuple[float, float]]:
    ends = st.floats(least, most)
    return st.tuples(ends, ends).map(lambda pair: (min(pair), max(pair)))


@given(
    st.tuples(sides, sides),
    ranges(0.01, 1.5),
    ranges(0.05, 20.0),
    st.floats(0, 1),
    st.lists(addresses, min_size=1, max_size=4),
    st.sampled_from(["PNG", "JPEG"]),
)
def test_boxes_and_flips_are_those_of_python(
    shape: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    flip_p: float,
    some: list[tuple[int, int]],
    kind: str,
) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    data, key = encoded(rows, kind), rng.key(1, 2, rng.MAP)
    places, words = zip(*some, strict=True)
    like = native.Crop(0, 0, 0, 0, 6, 5, False, True, False, False)
    drawing = native.Drawing(like, *scale, *ratio, *map(math.log, ratio), flip_p)
    counters = rng.counters(places, words)
    made = native.random_crops([data] * len(some), drawing, key, counters, **NO_LIMITS)
    crop = random_resized_crop((6, 5), scale, ratio, flip_p=flip_p)
    for pixels, (place, word) in zip(made, some, strict=True):
        assert np.array_equal(pixels, crop(data, rng.AddressedGenerator().at(key, place, word)))


def test_what_has_no_box_is_left_out() -> None:
    rows = np.zeros((4, 4, 3), np.uint8)
    files = [encoded(rows), b"", b"no image", encoded(rows)[:20], encoded(rows, "PNG")]
    like = native.Crop(0, 0, 0, 0, 2, 2, False, True, False, False)
    counters = np.zeros((len(files), 2), np.uint64)
    for scale, expected in ((1.0, [True, False, False, False, True]), (1e308, [False] * 5)):
        drawing = native.Drawing(like, scale, scale, 1.0, 1.0, 0.0, 0.0, 0.0)
        made = native.random_crops(files, drawing, np.zeros(2, np.uint64), counters, **NO_LIMITS)
        assert [pixels is not None for pixels in made] == expected
    with pytest.raises(ValueError, match="two of a counter"):
        native.random_crops(files, drawing, counters[0], counters[1:], **NO_LIMITS)
    with pytest.raises(TypeError, match="uint64"):
        native.random_crops(files, drawing, counters[0], counters.astype(int), **NO_LIMITS)
