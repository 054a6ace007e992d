"""Files and values as users have them: empty, of phones, damaged, or no image at all."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoded_images import FILES, by_pillow, encoded, levels_apart, photograph
from PIL import Image, UnidentifiedImageError, features

from backends import backend  # noqa: F401 - for every test here
from stoker.images import (
    center_crop,
    color_jitter,
    decode,
    normalize,
    random_crop,
    random_resized_crop,
    read_size,
    resize,
    to_chw,
)

ROWS = photograph(60, 80)
JPEG = encoded(ROWS)
OTHER_SHAPES = [(0, 5, 3), (5, 0, 3), (5, 5, 2), (3, 60, 80), (60, 80)]
DTYPES = [np.float32, np.uint16, np.int64, bool]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def two_pictures(**how: Any) -> bytes:
    """Return a JPEG with a second one behind it, as phones make them."""
    second = Image.fromarray(ROWS[::-1])
    return encoded(ROWS, "MPO", save_all=True, append_images=[second], **how)


EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EndProlog\n"
    b"0 0 8 8 rectfill\nshowpage\n%%EOF\n"
)


@pytest.mark.parametrize("read", [decode, read_size, resize(8), center_crop(8)])
def test_what_is_no_image_is_called_what_it_is_and_no_program_is_started_for_it(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "gs"
    interpreter.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for data, says in (
        (b"", "in an empty file"),
        (b"<!DOCTYPE html><htm", r"in 19 bytes that begin with b'<!DOCTYPE ht"),
        (EPS, "looks like EPS, which is not decoded by default"),
    ):
        with pytest.raises(UnidentifiedImageError, match=says):
            read(data)
    assert not (tmp_path / "started").exists()


def test_formats_name_what_is_decoded() -> None:
    ppm, png = encoded(ROWS, "PPM"), encoded(ROWS, "PNG")
    with pytest.raises(UnidentifiedImageError, match=r"looks like PPM.*formats=\['PPM'\]"):
        decode(ppm)
    assert np.array_equal(decode(ppm, formats=["ppm"]), ROWS)
    assert read_size(ppm, formats=["PPM"]) == (60, 80)
    with pytest.raises(UnidentifiedImageError, match="looks like PNG"):
        decode(png, formats=["PPM"])
    with pytest.raises(UnidentifiedImageError, match="looks like JPEG"):
        decode(JPEG, formats=["PPM"])
    assert np.array_equal(decode(JPEG, formats=["PPM", "JPEG"]), decode(JPEG))


@pytest.mark.parametrize(
    ("formats", "error", "words"),
    [
        ("PNG", TypeError, "formats must be a list of names such as"),
        (["PNG", 3], TypeError, "3 is in it"),
        (["PNGG"], ValueError, "Pillow's names of formats, such as 'PNG' or 'PPM', not 'PNGG'"),
        ([], ValueError, "not an empty one"),
    ],
)
def test_what_is_no_list_of_formats_is_refused(formats: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        decode(encoded(ROWS, "PNG"), formats=formats)


@pytest.mark.parametrize("read", [decode, read_size])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cats/1.jpg", r"not as its name 'cats/1.jpg': read it with Path"),
        (Path("cats/1.jpg"), "not as its name"),
        (ROWS, r"bytes, not array of \[60, 80, 3\]: give on="),
        (None, "bytes, not NoneType: give on="),
        ({"bytes": JPEG}, "bytes, not dict: give on="),
        ([JPEG, JPEG], r"bytes, not list: decode files one by one, before \.batch"),
    ],
)
def test_what_is_no_file_is_refused(read: Any, given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        read(given)


def test_a_file_in_an_array_of_bytes_is_a_file() -> None:
    data: Any = np.frombuffer(JPEG, np.uint8)
    assert np.array_equal(decode(data), decode(JPEG))
    assert np.array_equal(center_crop(30)(data), center_crop(30)(JPEG))
    assert np.array_equal(color_jitter(0.5)(data, rng()), color_jitter(0.5)(JPEG, rng()))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cats/1.jpg", r"not as its name 'cats/1\.jpg': read it"),
        (Path("cats/1.jpg"), r"not as its name 'cats/1\.jpg': read it"),
        (3, "bytes or an array, not int: give on="),
        (Image.fromarray(ROWS), r"not Image: convert it with a \.map\(numpy\.array"),
        (torch.from_numpy(ROWS), r"not Tensor: convert it with a \.map\(numpy\.array"),
        *((np.zeros(shape, np.uint8), "with 1, 3 or 4 channels, not ") for shape in OTHER_SHAPES),
        (ROWS[..., 0], r"for a grey image give image\[\.\.\., None\]"),
        *((ROWS.astype(dtype), f"need uint8 images, not {np.dtype(dtype)}") for dtype in DTYPES),
    ],
)
def test_what_is_no_image_is_not_cropped(given: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        resize(8)(given)
    if isinstance(given, torch.Tensor):
        with pytest.raises(TypeError, match=words):
            decode(given)  # type: ignore[arg-type]


def test_crops_larger_than_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match="an image of 60 x 80 with a padding of 2 is smaller"):
        random_crop((65, 9), 2)(ROWS, rng())


def test_two_pictures_in_one_file_give_the_first() -> None:
    data = two_pictures()
    with Image.open(io.BytesIO(data)) as read:
        assert read.format == "MPO"
    assert read_size(data) == (60, 80)
    assert np.array_equal(decode(data), by_pillow(data))
    assert np.array_equal(random_crop(40)(data, rng()), random_crop(40)(decode(data), rng()))


def test_scans_are_counted_in_files_of_several_pictures_too() -> None:
    data = two_pictures(progressive=True)
    last = data.rindex(b"\xff\xda", 0, data.index(b"\xff\xd9"))
    end = data.index(b"\xff\xd9")
    many = data[:end] + data[last:end] * 300 + data[end:]
    with pytest.raises(ValueError, match="scans: more than"):
        decode(many, max_pixels=60 * 80)


def test_much_beside_the_pixels_is_passed_over() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "x" * 60_000
    data = encoded(ROWS, exif=exif, icc_profile=bytes(300_000))
    assert len(data) > 360_000
    assert np.array_equal(decode(data), decode(JPEG))
    assert decode(data, orient=True).shape == (80, 60, 3)
    assert read_size(data, orient=True) == (80, 60)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0",
        b"Exif\0\0II*\0",
        b"Exif\0\0no tags at all",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x04\0\0\0up!\0\0\0\0\0",  # a text
    ],
    ids=["nothing", "short", "other", "text"],
)
def test_damaged_exif_turns_nothing(exif: bytes) -> None:
    data = encoded(ROWS, exif=exif)
    assert np.array_equal(decode(data, orient=True), decode(JPEG))
    assert read_size(data, orient=True) == (60, 80)


def test_exif_that_pillow_cannot_read_turns_nothing() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(ROWS, "WEBP", lossless=True, exif=exif)
    broken = data.replace(b"MM\0*", b"MM\xaa*")
    assert broken != data
    assert decode(data, orient=True).shape == (80, 60, 3)
    assert np.array_equal(decode(broken, orient=True), ROWS)
    assert read_size(broken, orient=True) == (60, 80)


def test_damage_is_an_error_of_the_system_whatever_pillow_calls_it() -> None:
    data = encoded(np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8), "PNG")
    second = data.index(b"IDAT", data.index(b"IDAT") + 4)
    with pytest.raises(OSError, match="the PNG is damaged: broken PNG file"):
        decode(data[:second] + b"$7\xdd\xed" + data[second + 4 :])


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
@pytest.mark.parametrize("read", [decode, resize(8)])
def test_damage_of_other_formats_is_an_error_of_the_system_too(read: Any) -> None:
    data = encoded(ROWS, "AVIF")
    assert read(data).shape[2] == 3
    at = data.index(b"mdat") + 4
    with pytest.raises(OSError, match=r"the (AVIF|image) is damaged"):
        read(data[:at] + bytes(len(data) - at))
    with pytest.raises(OSError, match="the image is damaged"):
        read(data.replace(b"av01", b"av00", 1))


@pytest.mark.parametrize("name", ["ycck", "cmyk-plain"])
def test_inks_are_taken_as_pillow_takes_them(name: str) -> None:
    data = FILES[name]
    assert np.array_equal(decode(data), by_pillow(data))
    assert levels_apart(center_crop(40)(data), center_crop(40)(by_pillow(data))) == 0


# -- batches


def test_the_image_of_a_batch_that_fails_is_named() -> None:
    with pytest.raises(OSError, match=r"ends early|truncated") as caught:
        random_resized_crop(8)([JPEG, JPEG[:-200], JPEG], rng())
    assert caught.value.__notes__ == ["in image 1 of a batch of 3"]


def test_batches_are_of_one_size_not_empty_and_may_be_arrays_of_files() -> None:
    other = encoded(photograph(60, 70))
    with pytest.raises(
        ValueError, match=r"image 1 of the batch has become \[30, 35, 3\], but the first \[30, 40"
    ):
        resize(30)([JPEG, other])
    assert resize((30, 40))([JPEG, other]).shape == (2, 30, 40, 3)
    assert center_crop(20)(np.array([JPEG, other], object)).shape == (2, 20, 20, 3)
    with pytest.raises(ValueError, match="no images"):
        resize(8)([])


def test_results_of_more_pixels_than_allowed_are_refused() -> None:
    line = encoded(photograph(1, 4000), "PNG")
    with pytest.raises(ValueError, match=r"1 x 4000 would become 2000 x 8000000, more than"):
        resize(2000)(line)
    assert resize((8, 9))(line).shape == (8, 9, 3)


# -- functions that are called otherwise than meant


@pytest.mark.parametrize("make", [resize, center_crop, random_crop, random_resized_crop])
@pytest.mark.parametrize("image", [JPEG, ROWS])
def test_a_map_of_what_makes_a_map_says_so(make: Any, image: Any) -> None:
    with pytest.raises(TypeError, match=r"an image instead of a size: .* \.map\(stoker"):
        make(image)


@pytest.mark.parametrize(("make", "what"), [(normalize, "means"), (color_jitter, "strengths")])
def test_so_do_those_that_take_no_size(make: Any, what: str) -> None:
    with pytest.raises(TypeError, match=rf"instead of {what}: .*map\(stoker"):
        make(ROWS)


@pytest.mark.parametrize("fn", [normalize(), to_chw])
@pytest.mark.parametrize("given", [JPEG, [ROWS], {"image": ROWS}])
def test_pixels_are_not_files(fn: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=r"an array or a tensor, not \w+: decode or crop"):
        fn(given)


@pytest.mark.parametrize("wrong", [0.5, ("a", "b"), (0.1, 0.2, 0.3), None, "ab"])
def test_ranges_are_two_numbers(wrong: Any) -> None:
    with pytest.raises(ValueError, match="scale= must be the smallest and the largest"):
        random_resized_crop(8, scale=wrong)
    if wrong != 0.5:
        with pytest.raises(ValueError, match="brightness= must be"):
            color_jitter(brightness=wrong)
        with pytest.raises(ValueError, match="hue= must be"):
            color_jitter(hue=wrong)


def test_ranges_may_be_lists() -> None:
    one = color_jitter(brightness=[0.5, 1.5])(ROWS, rng())
    assert np.array_equal(one, color_jitter(brightness=(0.5, 1.5))(ROWS, rng()))
