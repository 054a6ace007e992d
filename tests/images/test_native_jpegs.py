"""stoker-native: the pixels of Pillow, of JPEGs of every kind, and errors for what is none."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoded_images import FILES, KINDS, by_pillow, encoded, levels_apart, photograph
from encoded_images import resized_by_pillow as by_hand
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("stoker_native", reason="stoker-native is not built here")

ROOT = Path(__file__).parents[2]
NO_LIMITS = {"max_pixels": 1 << 40, "max_scan_pixels": 1 << 50}

sizes = st.integers(1, 70)
pictures = st.builds(
    lambda height, width, kind: encoded(photograph(height, width), **KINDS[kind]),
    sizes,
    sizes,
    st.sampled_from(sorted(KINDS)),
)
files = st.sampled_from(sorted(FILES)).map(FILES.__getitem__) | pictures


def whole(data: bytes) -> np.ndarray:
    height, width = native.jpeg_size(data)
    return native.jpeg_decode(data, (0, 0, width, height), **NO_LIMITS)


def drawn_box(data: Any, height: int, width: int) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a box."""
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    tall, wide = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    return top, left, tall, wide


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_of_every_kind_are_decoded_as_by_pillow(name: str) -> None:
    assert native.jpeg_size(FILES[name]) == (77, 101)
    assert np.array_equal(whole(FILES[name]), by_pillow(FILES[name]))


@given(pictures)
def test_images_of_any_size_are_decoded_as_by_pillow(data: bytes) -> None:
    assert np.array_equal(whole(data), by_pillow(data))


@given(files, st.data())
def test_a_box_is_a_slice_of_the_whole(data: bytes, draw: Any) -> None:
    rows = whole(data)
    top, left, height, width = drawn_box(draw, *rows.shape[:2])
    box = native.jpeg_decode(data, (left, top, width, height), **NO_LIMITS)
    assert np.array_equal(box, rows[top : top + height, left : left + width])


@given(files, st.tuples(st.integers(1, 90), st.integers(1, 90)), st.booleans(), st.data())
def test_a_resized_crop_is_pillows_within_one_level(
    data: bytes, size: tuple[int, int], flip: bool, draw: Any
) -> None:
    rows = by_pillow(data)
    box = top, left, height, width = drawn_box(draw, *rows.shape[:2])
    crop = native.Crop(left, top, width, height, *size, flip, True, False, False)
    made = native.jpeg_crop(data, crop, **NO_LIMITS)
    expected = by_hand(rows, box, size)
    assert levels_apart(made[:, ::-1] if flip else made, expected) <= 1
    assert np.array_equal(made, native.pixels_crop(rows, crop))


@given(st.lists(files | st.binary(), max_size=5), st.tuples(sizes, sizes))
def test_many_crops_in_one_call_are_each_what_they_are_alone(
    many: list[bytes], size: tuple[int, int]
) -> None:
    crops = [
        native.Crop(0, 0, 1 + n, 1, *size, n % 2, True, False, False) for n in range(len(many))
    ]
    made = native.crop_many(many, crops, **NO_LIMITS)
    for data, crop, pixels in zip(many, crops, made, strict=True):
        if pixels is None:
            with pytest.raises((OSError, ValueError)):
                native.jpeg_crop(data, crop, **NO_LIMITS)
        else:
            assert np.array_equal(pixels, native.jpeg_crop(data, crop, **NO_LIMITS))


@given(st.sampled_from([1, 3, 4]), st.tuples(sizes, sizes), st.tuples(sizes, sizes), st.data())
def test_all_paths_give_the_same_bits(
    channels: int, shape: tuple[int, int], size: tuple[int, int], draw: Any
) -> None:
    seed = draw.draw(st.integers(0, 99))
    rows = np.random.default_rng(seed).integers(0, 256, (*shape, channels), np.uint8)
    top, left, height, width = drawn_box(draw, *shape)
    flip, antialias = draw.draw(st.booleans()), draw.draw(st.booleans())
    crop = native.Crop(left, top, width, height, *size, flip, antialias, False, False)
    made = {}
    for name in native.paths():
        native.use_path(name)
        made[name] = native.pixels_crop(rows, crop)
        assert native.last_path() == name
    native.use_path("")
    assert all(np.array_equal(made["scalar"], other) for other in made.values())


def test_the_best_path_is_taken() -> None:
    native.pixels_crop(photograph(9, 9), native.Crop(0, 0, 9, 9, 3, 3, 0, 1, 0, 0))
    assert native.last_path() == native.paths()[0]
    with pytest.raises(ValueError, match="'mmx' is none of"):
        native.use_path("mmx")


def test_large_reductions_stay_within_one_level() -> None:
    rows = photograph(450, 650)
    for size in [(10, 15), (1, 1), (450, 4), (16, 650)]:
        crop = native.Crop(0, 0, 650, 450, *size, False, True, False, False)
        assert (
            levels_apart(native.pixels_crop(rows, crop), by_hand(rows, (0, 0, 450, 650), size)) <= 1
        )


def test_the_codec_may_make_it_smaller_first() -> None:
    rows = photograph(400, 600)
    data = encoded(rows, quality=95)
    for box in [(0, 0, 400, 600), (33, 51, 311, 401)]:
        top, left, height, width = box
        crop = native.Crop(left, top, width, height, 60, 80, False, True, False, True)
        made = native.jpeg_crop(data, crop, **NO_LIMITS).astype(int)
        exact = by_hand(by_pillow(data), box, (60, 80))
        assert np.abs(made - exact).mean() < 4  # near, and not the same


def test_rows_need_not_lie_together() -> None:
    rows = photograph(50, 60)
    crop = native.Crop(0, 0, 30, 40, 11, 13, False, True, False, False)
    expected = native.pixels_crop(rows[5:45, 7:37].copy(), crop)
    assert np.array_equal(native.pixels_crop(rows[5:45, 7:37], crop), expected)
    mirrored = rows[:, ::-1][5:45, 7:37]
    assert np.array_equal(
        native.pixels_crop(mirrored, crop), native.pixels_crop(mirrored.copy(), crop)
    )


@pytest.mark.parametrize(
    "box", [(-1, 0, 5, 5), (0, 0, 102, 5), (0, 73, 5, 5), (0, 0, 0, 5), (0, 0, 5, -1)]
)
def test_boxes_beyond_the_image_are_refused(box: tuple[int, int, int, int]) -> None:
    data = FILES["rgb"]
    with pytest.raises(ValueError, match="is none of an image of 101 x 77"):
        native.jpeg_decode(data, box, **NO_LIMITS)
    crop = native.Crop(*box, 4, 4, False, True, False, False)
    with pytest.raises(ValueError, match="is none of an image of 101 x 77"):
        native.jpeg_crop(data, crop, **NO_LIMITS)
    with pytest.raises(ValueError, match="is none of an image of 101 x 77"):
        native.pixels_crop(whole(data), crop)


def test_what_is_no_picture_of_pixels_is_refused() -> None:
    crop = native.Crop(0, 0, 1, 1, 1, 1, False, True, False, False)
    with pytest.raises(TypeError, match="uint8, not float64"):
        native.pixels_crop(np.zeros((2, 2, 3)), crop)
    with pytest.raises(ValueError, match="channels"):
        native.pixels_crop(np.zeros((2, 2), np.uint8), crop)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["rgb", "arithmetic-progressive"])
def test_files_that_end_early_are_errors(name: str, share: float) -> None:
    data = FILES[name][: int(share * len(FILES[name]))]
    with pytest.raises(OSError, match=r"ends early|JPEG"):
        whole(data)


def test_more_pixels_and_scans_than_allowed_are_refused() -> None:
    with pytest.raises(native.TooLarge, match="101 x 77 pixels: more than 7776"):
        native.jpeg_decode(FILES["rgb"], (0, 0, 1, 1), max_pixels=7776, max_scan_pixels=1 << 40)
    crop = native.Crop(0, 0, 4, 4, 4, 4, False, True, False, False)
    with pytest.raises(native.TooLarge, match="2000 x 2000 pixels in at least 2 scans"):
        native.jpeg_crop(bomb(200), crop, max_pixels=1 << 40, max_scan_pixels=6_000_000)


def bomb(scans: int) -> bytes:
    """A small progressive JPEG that says it is large, and of many scans."""
    data = encoded(photograph(16, 16), progressive=True)
    frame = data.index(b"\xff\xc2")
    data = data[: frame + 5] + (2000).to_bytes(2, "big") * 2 + data[frame + 9 :]
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * scans + data[-2:]


def fuzz(count: int, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("fuzz_jpegs.py"), str(count)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"of {count} files raised; paths {', '.join(sorted(native.paths()))}" in done.stdout


def test_mutated_files_raise_exceptions_only() -> None:
    fuzz(300)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build the library with sanitizers; returns what has Python use it."""
    library = tmp_path_factory.mktemp("sanitized") / "libstoker_native.so"
    flags = ["-std=c11", "-g", "-O1", "-fPIC", "-shared", "-fno-omit-frame-pointer"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = sorted(map(str, (ROOT / "native" / "csrc").glob("*.c")))
    links = ["-ljpeg", "-lz", "-lm"]
    subprocess.run(["cc", *flags, *sanitize, *sources, "-o", library, *links], check=True)
    asan = subprocess.check_output(["cc", "-print-file-name=libasan.so"], text=True).strip()
    return {
        "STOKER_NATIVE_LIBRARY": str(library),
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_sanitizers_find_nothing_in_mutated_files(sanitized: dict[str, str]) -> None:
    fuzz(20_000, **sanitized)


@pytest.mark.full
def test_sanitizers_find_nothing_in_other_tests(sanitized: dict[str, str]) -> None:
    tests = [ROOT / "tests" / "sources" / "test_native_windows.py"]
    tests += [
        ROOT / "tests" / "images" / f"test_native_{what}.py" for what in ("tables", "pngs", "draws")
    ]
    alone = ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-q"]
    alone += ["--hypothesis-profile=ci"]  # without deadlines: sanitizers are slow
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *alone, *tests],
        env={**os.environ, **sanitized},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


tiny = st.sampled_from([1e-300, 1e-9, 5e-7, 1e-6, 1.9e-6, 1e-3])


@given(st.data(), tiny, tiny, st.booleans(), st.booleans(), st.booleans())
def test_a_tiny_box_is_the_pixel_that_it_lies_in(
    draw: Any, tall: float, wide: float, antialias: bool, beyond: bool, dct: bool
) -> None:
    rows = photograph(5, 7)
    y, x = draw.draw(st.integers(0, 4)), draw.draw(st.integers(0, 6))
    inside = draw.draw(st.sampled_from([0.0, 0.4]))
    crop = native.Crop(x + inside, y + inside, wide, tall, 3, 2, False, antialias, beyond, dct)
    made = native.pixels_crop(rows, crop)
    if not beyond:
        assert (made == rows[y, x]).all()
    assert made.shape == (3, 2, 3)
    data = encoded(rows)
    assert native.jpeg_crop(data, crop, **NO_LIMITS).shape == (3, 2, 3)


@pytest.mark.parametrize("at", [(7 - 1e-7, 0), (0, 5 - 1e-7), (7, 0), (7 + 5e-7, 5 + 5e-7)])
def test_a_tiny_box_at_the_edge_is_the_last_pixel(at: tuple[float, float]) -> None:
    rows = photograph(5, 7)
    made = native.pixels_crop(rows, native.Crop(*at, 1e-7, 1e-7, 2, 2, 0, 1, 0, 0))
    assert (made == rows[min(int(at[1] + 1e-6), 4), min(int(at[0] + 1e-6), 6)]).all()


def test_threads_do_not_disturb_each_other() -> None:
    rows = [photograph(60 + n, 80 + n) for n in range(4)]
    work = [
        (encoded(r), native.Crop(0, 0, 80, 60, 9 + n, 7, 0, 1, 0, 0)) for n, r in enumerate(rows)
    ]
    expected = [native.jpeg_crop(data, crop, **NO_LIMITS) for data, crop in work]
    with ThreadPoolExecutor(8) as executor:
        made = list(executor.map(lambda n: native.jpeg_crop(*work[n % 4], **NO_LIMITS), range(400)))
    assert all(np.array_equal(one, expected[n % 4]) for n, one in enumerate(made))
