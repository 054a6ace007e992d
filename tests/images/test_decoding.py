"""Decoding: every kind of image becomes RGB of 8 bits, and broken ones are errors."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoded_images import saved as encoded
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

import stoker
from backends import backend  # noqa: F401 - for every test here
from stoker.images import center_crop, decode, read_size, resize


def gradient(channels: int | None = None) -> np.ndarray:
    shape = (24, 32) if channels is None else (24, 32, channels)
    return (np.arange(np.prod(shape)) * 5 % 256).astype(np.uint8).reshape(shape)


def checked(data: bytes) -> np.ndarray:
    found = decode(data)
    assert found.dtype == np.uint8
    assert found.ndim == 3
    assert found.shape[2] == 3
    assert found.flags.writeable
    assert found.flags.c_contiguous
    assert found.flags.owndata or found.base is None
    return found


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=-1)


@pytest.mark.parametrize("shape", [(900, 700), (3, 200_000), (200_000, 3)])
def test_large_images_are_those_of_pillow(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    assert np.array_equal(checked(encoded(Image.fromarray(pixels), compress_level=0)), pixels)


@given(st.integers(1, 40), st.integers(1, 40))
def test_any_size_keeps_height_and_width(height: int, width: int) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    assert np.array_equal(checked(encoded(Image.fromarray(rows))), rows)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "BMP", "TIFF"])
def test_other_formats(kind: str) -> None:
    flat = np.full((24, 32, 3), (200, 100, 50), np.uint8)
    found = checked(encoded(Image.fromarray(flat), kind))
    assert np.abs(found.astype(int) - flat).max() <= 4


OPAQUE = np.full((24, 32), 99, np.uint8)
PLAIN = {
    "grey": (Image.fromarray(gradient()), grey(gradient())),
    "grey with alpha": (Image.fromarray(np.dstack([gradient(), OPAQUE]), "LA"), grey(gradient())),
    "colour with alpha": (Image.fromarray(np.dstack([gradient(3), OPAQUE]), "RGBA"), gradient(3)),
    "one bit": (Image.fromarray(gradient() > 127), grey((gradient() > 127).astype(np.uint8) * 255)),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_other_modes_become_rgb(kind: str) -> None:
    image, expected = PLAIN[kind]
    assert np.array_equal(checked(encoded(image)), expected)


@pytest.mark.parametrize(
    "transparency", [None, 3, bytes([0, 128, 255, 255])], ids=["none", "one", "table"]
)
def test_palettes_with_and_without_transparency(transparency: Any) -> None:
    image = Image.fromarray(gradient() % 4, "P")
    palette = [255, 0, 0, 0, 255, 0, 0, 0, 255, 10, 20, 30]
    image.putpalette(palette)
    how = {} if transparency is None else {"transparency": transparency}
    expected = np.array(palette, np.uint8).reshape(4, 3)[gradient() % 4]
    assert np.array_equal(checked(encoded(image, **how)), expected)  # and warns of nothing
    assert np.array_equal(checked(encoded(image, "GIF")), expected)


def test_grey_and_colour_with_one_transparent_colour() -> None:
    found = checked(encoded(Image.fromarray(gradient()), transparency=5))
    assert np.array_equal(found, grey(gradient()))
    found = checked(encoded(Image.fromarray(gradient(3)), transparency=(0, 5, 10)))
    assert np.array_equal(found, gradient(3))


def test_cmyk() -> None:
    flat = np.zeros((8, 8, 4), np.uint8)
    flat[..., 1] = 255
    red = checked(encoded(Image.fromarray(flat, "CMYK"), "JPEG", quality=95))
    assert red.shape == (8, 8, 3)
    assert red[..., 0].min() > 200
    assert red[..., 1].max() < 60


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_to_eight(kind: str) -> None:
    deep = (gradient().astype(np.uint16) * 257)[:, :, None][:, :, 0]
    image = Image.fromarray(deep)
    assert image.mode == "I;16"
    assert np.array_equal(checked(encoded(image, kind)), grey(gradient()))
    ends = Image.fromarray(np.array([[0, 128, 32768, 65535]], np.uint16))
    assert checked(encoded(ends, kind))[0, :, 0].tolist() == [0, 0, 128, 255]


def test_twelve_bits_are_scaled_to_eight() -> None:
    # Width, height, bits, compression (none), black is zero, offset, samples, rows, bytes: a TIFF.
    tags = {256: 4, 257: 1, 258: 12, 259: 1, 262: 1, 273: 200, 277: 1, 278: 1, 279: 6}
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    packed = int(f"{0:03x}{4095:03x}{2048:03x}{161:03x}", 16).to_bytes(6, "big")
    data = (head + fields + bytes(4)).ljust(200, b"\0") + packed
    assert checked(data)[0, :, 0].tolist() == [0, 255, 128, 10]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("read", [decode, resize(8), center_crop(8)])
def test_what_is_wider_than_sixteen_bits_is_refused(read: Any, dtype: Any) -> None:
    data = encoded(Image.fromarray(np.arange(64).reshape(8, 8).astype(dtype)), "TIFF")
    mode = "I" if dtype == np.int32 else "F"
    with pytest.raises(ValueError, match=rf"TIFF has pixels of mode {mode} \(32-bit .* read it"):
        read(data)


def test_animations_give_their_first_frame() -> None:
    frames = [Image.fromarray(np.full((6, 6), n, np.uint8)) for n in (10, 200)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (checked(data) == 10).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.7])
def test_truncated_data_is_an_error(kind: str, share: float) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(rows), kind)
    with pytest.raises((OSError, SyntaxError)):
        decode(data[: int(len(data) * share)])


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (2, "thread"), (1, "process")])
def test_a_broken_file_in_a_folder_is_named(tmp_path: Path, workers: int, kind: str) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for n in range(4):
            Image.fromarray(gradient(3)).save(tmp_path / label / f"{n}.png")
    broken = tmp_path / "dog" / "2.png"
    broken.write_bytes(broken.read_bytes()[:80])
    chain = stoker.from_folder(str(tmp_path), seed=0).map(decode, on="image").echo(2)
    pipeline = chain.random_map(lambda x, rng: x, on="image").batch(2)
    with pytest.raises(stoker.StageError, match=r"map\(decode.*dog/2\.png") as caught:
        list(pipeline.workers(workers, kind=kind))
    assert caught.value.path == str(broken)
    assert caught.value.index == 6
    Image.fromarray(gradient(3)).save(broken)
    batches = list(pipeline.workers(workers, kind=kind))
    assert len(batches) == 8
    assert batches[0].image.shape == (2, 24, 32, 3)
    assert batches[0].label.dtype == np.int64


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_turned_as_exif_says_if_that_is_asked_for(kind: str, turn: int) -> None:
    image = Image.fromarray(gradient(3))
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(image, kind, exif=exif)
    with Image.open(io.BytesIO(data)) as read:
        upright = np.array(ImageOps.exif_transpose(read).convert("RGB"))
        as_kept = np.array(read.convert("RGB"))
    assert np.array_equal(decode(data, orient=True), upright)
    assert decode(data, orient=True).flags.c_contiguous
    assert np.array_equal(checked(data), as_kept)
    assert read_size(data) == (24, 32)
    assert read_size(data, orient=True) == upright.shape[:2]


@pytest.mark.parametrize("turn", [3, 6])
def test_tiffs_are_turned_once(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(Image.fromarray(gradient(3)), "TIFF", exif=exif)
    upright = np.rot90(gradient(3), {3: 2, 6: 3}[turn])
    assert np.array_equal(decode(data, orient=True), upright)
    assert np.array_equal(decode(data), upright)  # Pillow does it
    assert read_size(data) == read_size(data, orient=True) == upright.shape[:2]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_larger_images_than_allowed_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.fromarray(gradient(3)), kind)
    assert decode(data, max_pixels=24 * 32).shape == (24, 32, 3)
    with pytest.raises(ValueError, match=f"32 x 24 pixels: more than {24 * 32 - 1}"):
        decode(data, max_pixels=24 * 32 - 1)
    if kind == "PNG":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(ValueError, match="more pixels than Pillow"):
            decode(data)


def test_no_memory_is_asked_for_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(encoded(Image.fromarray(gradient(3)), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xdc\xff\xdc"  # height and width
    monkeypatch.setattr(np, "empty", pytest.fail)
    with pytest.raises(ValueError, match=r"65500 x 65500 pixels: more than|than Pillow"):
        decode(bytes(data))


def test_a_file_of_too_many_scans_is_refused() -> None:
    data = encoded(Image.fromarray(gradient(3)), "JPEG", progressive=True)
    assert decode(data, max_pixels=24 * 32 * 8).shape == (24, 32, 3)
    last = data.rindex(b"\xff\xda")
    many = data[:-2] + data[last:-2] * 300 + data[-2:]
    with pytest.raises(ValueError, match="scans: more than"):
        decode(many, max_pixels=24 * 32 * 8)


@pytest.mark.parametrize("made", [bytearray, memoryview])
def test_other_kinds_of_bytes(made: Any) -> None:
    data = encoded(Image.fromarray(gradient(3)), "JPEG")
    assert np.array_equal(decode(made(data)), decode(data))
    assert read_size(made(data)) == (24, 32)


def test_sizes_of_damaged_files_are_errors() -> None:
    with pytest.raises(OSError, match=r"ends early|truncated|cannot identify"):
        read_size(encoded(Image.fromarray(gradient(3)), "JPEG")[:20])
