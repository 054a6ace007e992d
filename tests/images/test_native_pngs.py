"""PNGs in C: the pixels of Pillow, and nothing for files that Pillow has to take or to refuse."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from encoded_images import by_pillow, encoded, photograph, saved
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

native = pytest.importorskip("stoker_native", reason="stoker-native is not built here")

CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}
LIMIT = 1 << 40


def png(header: tuple[int, ...], stream: bytes, piece: int = 1 << 16, *more: bytes) -> bytes:
    """Write a PNG by hand; ``more`` are chunks before its stream, each a name and what it holds."""
    pieces = [b"IDAT" + stream[at : at + piece] for at in range(0, len(stream), piece)]
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", *header), *more, *pieces, b"IEND"]
    whole = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


@st.composite
def pngs(draw: Any) -> bytes:
    """Any bytes are rows, if the first of each is the number of a filter."""
    height, width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    colours = draw(st.sampled_from(sorted(CHANNELS)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    rows = rng.integers(0, 256, (height, 1 + width * CHANNELS[colours]), np.uint8)
    rows[:, 0] = draw(st.lists(st.integers(0, 4), min_size=height, max_size=height))
    stream = zlib.compress(rows.tobytes())
    return png((width, height, 8, colours, 0, 0, 0), stream, draw(st.integers(1, 400)))


@given(pngs())
def test_every_filter_and_colour_is_decoded_as_by_pillow(data: bytes) -> None:
    assert np.array_equal(native.png_decode(data, max_pixels=LIMIT), by_pillow(data))


@given(pngs(), st.data())
def test_what_is_decoded_of_a_damaged_file_is_what_pillow_decodes(data: bytes, draw: Any) -> None:
    damaged = bytearray(data)
    damaged[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    made = native.png_decode(bytes(damaged), max_pixels=LIMIT)
    assert made is None or np.array_equal(made, by_pillow(bytes(damaged)))
    assert (made is None) == (cropped(bytes(damaged)) is None)


def cropped(data: bytes, box: tuple[int, ...] = (0, 0, 1, 1)) -> np.ndarray | None:
    crop = native.Crop(*box, 5, 3, True, True, False, False)
    (made,) = native.crop_many([data], [crop], max_pixels=LIMIT, max_scan_pixels=LIMIT)
    return made


@given(pngs(), st.data())
def test_a_crop_is_one_of_its_pixels(data: bytes, draw: Any) -> None:
    rows = by_pillow(data)
    height, width = native.png_size(data)
    assert rows.shape == (height, width, 3)
    box = 0, 0, draw.draw(st.integers(1, width)), draw.draw(st.integers(1, height))
    expected = native.pixels_crop(rows, native.Crop(*box, 5, 3, True, True, False, False))
    made = cropped(data, box)
    assert made is not None
    assert np.array_equal(made, expected)
    assert cropped(data, (0, 0, width + 1, 1)) is None


@given(pngs(), st.data())
def test_what_is_decoded_of_the_beginning_of_a_file_is_the_whole(data: bytes, draw: Any) -> None:
    made = native.png_decode(data[: draw.draw(st.integers(0, len(data)))], max_pixels=LIMIT)
    assert made is None or np.array_equal(made, by_pillow(data))


def test_other_kinds_are_left_to_pillow() -> None:
    rows = photograph(9, 7)
    deep = Image.fromarray(np.arange(63, dtype=np.uint16).reshape(9, 7))
    others = [encoded(rows, "PNG", mode) for mode in ("P", "1")]
    for data in (*others, saved(deep, "PNG"), encoded(rows), b"", encoded(rows, "PNG")[:25]):
        assert native.png_decode(data, max_pixels=LIMIT) is None
        with pytest.raises(OSError, match="no PNG of 8 bits"):
            native.png_size(data)
    usual = encoded(rows, "PNG")
    assert native.png_decode(usual, max_pixels=62) is None
    assert np.array_equal(native.png_decode(usual, max_pixels=63), rows)


ROWS = zlib.compress(bytes(4 * 13))  # of 4 x 4 pixels
HEADER = (4, 4, 8, 2, 0, 0, 0)


@pytest.mark.parametrize(
    "data",
    [
        png((*HEADER[:6], 1), ROWS),  # interlaced
        png(HEADER, ROWS, 99, b"acTL" + struct.pack(">II", 1, 0)),  # animated
        png(HEADER, zlib.compress(bytes(1 << 24))),  # of more than its pixels
        png(HEADER, zlib.compress(bytes(3 * 13))),
        png(HEADER, zlib.compress(b"\5" + bytes(4 * 13 - 1))),  # no filter
        png(HEADER, ROWS[:-1]),
        png(HEADER, b""),
        png(HEADER, ROWS)[:-12],  # no chunk behind the stream
        png((0, *HEADER[1:]), ROWS),
    ],
)
def test_odd_files_are_left_to_pillow(data: bytes) -> None:
    assert native.png_decode(data, max_pixels=LIMIT) is None
