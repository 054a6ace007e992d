"""Crops and sizes: Pillow's pixels within one level, torchvision's boxes, with and without C."""

from __future__ import annotations

import functools
import math
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoded_images import FILES, KINDS, by_pillow, encoded, levels_apart, photograph
from encoded_images import resized_by_pillow as by_hand
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import stoker
from backends import backend  # noqa: F401 - for every test here
from stoker.images import (
    center_crop,
    decode,
    hflip,
    random_crop,
    random_resized_crop,
    resize,
    resize_center_crop,
)
from stoker.images.cropping import random_box

ROWS = photograph(77, 101)


@functools.cache
def forms() -> dict[str, Any]:
    """The same sort of picture in every form that an image may have."""
    made: dict[str, Any] = dict(FILES)
    made |= {kind: encoded(ROWS, **how) for kind, how in KINDS.items()}
    made |= {kind: encoded(ROWS, kind, lossless=True) for kind in ("PNG", "WEBP")}
    return made | {"array": ROWS, "slice": photograph(90, 120)[3:80, 5:106]}


every_form = pytest.mark.parametrize("form", sorted(forms()))


def pixels_of(image: Any) -> np.ndarray:
    return image if isinstance(image, np.ndarray) else by_pillow(image)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn(seed: int) -> tuple[int, int, int, int]:
    box = random_box(77, 101, (0.08, 1.0), (3 / 4, 4 / 3), rng(seed))
    return int(box.top), int(box.left), int(box.height), int(box.width)


@every_form
def test_a_random_resized_crop_is_crop_and_resize(form: str) -> None:
    image = forms()[form]
    for seed in range(4):
        made = random_resized_crop((40, 48))(image, rng(seed))
        assert made.dtype == np.uint8
        assert levels_apart(made, by_hand(pixels_of(image), drawn(seed), (40, 48))) <= 1


@every_form
def test_it_flips_with_a_probability(form: str) -> None:
    image = forms()[form]
    plain = random_resized_crop(32)(image, rng())
    assert np.array_equal(random_resized_crop(32, flip_p=1.0)(image, rng()), plain[:, ::-1])
    half = random_resized_crop(8, flip_p=0.5)
    flipped = sum(
        not np.array_equal(half(image, rng(seed)), random_resized_crop(8)(image, rng(seed)))
        for seed in range(40)
    )
    assert 8 < flipped < 32


@every_form
def test_without_antialiasing_two_pixels_count(form: str) -> None:
    image = forms()[form]
    top, left, height, width = drawn(1)
    cut = Image.fromarray(pixels_of(image)[top : top + height, left : left + width])
    extent = (0, 0, width, height)
    expected = cut.transform((16, 16), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR)
    made = random_resized_crop(16, antialias=False)(image, rng(1))
    assert levels_apart(made, np.array(expected)) <= 1


@every_form
def test_sizes_are_those_of_torchvision(form: str) -> None:
    image = forms()[form]
    assert resize(32)(image).shape == (32, 41, 3)  # the longer side is cut to a whole number
    for size in [(77, 101), (50, 30), (100, 120)]:
        expected = by_hand(pixels_of(image), (0, 0, 77, 101), size)
        assert levels_apart(resize(size)(image), expected) <= 1


@every_form
def test_the_middle_of_a_resized_image_in_one(form: str) -> None:
    image = forms()[form]
    for antialias in (True, False):
        whole = resize(48, antialias=antialias)(image)
        made = resize_center_crop(resize=48, crop=(40, 44), antialias=antialias)(image)
        assert levels_apart(made, center_crop((40, 44))(whole)) <= 1


@every_form
def test_the_middle_has_a_border_where_the_image_ends(form: str) -> None:
    image = forms()[form]
    rows = pixels_of(image)
    assert np.array_equal(center_crop((51, 60))(image), rows[13:64, 20:80])
    made = center_crop((81, 41))(image)
    assert np.array_equal(made[2:79], rows[:, 30:71])
    assert not made[:2].any()
    assert not made[79:].any()


@every_form
@pytest.mark.parametrize(("size", "padding"), [(70, 4), (20, 90)])
def test_random_crops_are_slices_and_empty_beside_the_image(
    form: str, size: int, padding: int
) -> None:
    image = forms()[form]
    padded = np.pad(pixels_of(image), ((padding, padding), (padding, padding), (0, 0)))
    for seed in range(12):
        draw = rng(seed)
        top, left = (int(draw.random() * (n - size + 1)) for n in padded.shape[:2])
        made = random_crop(size, padding)(image, rng(seed))
        assert np.array_equal(made, padded[top : top + size, left : left + size])


def test_random_crops_take_every_place() -> None:
    marked = np.arange(16, dtype=np.uint8).reshape(4, 4, 1)
    generator = rng()
    counts = np.bincount(
        [int(random_crop(2)(marked, generator)[0, 0, 0]) for _ in range(900)], minlength=16
    ).reshape(4, 4)
    assert (counts[:3, :3] > 60).all()
    assert counts.sum() == counts[:3, :3].sum()


# -- boxes


def by_torchvision(height: int, width: int, draw: random.Random) -> tuple[int, int, int, int]:
    """The published algorithm: top, left, height, width."""
    for _ in range(10):
        area = height * width * draw.uniform(0.08, 1.0)
        aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return draw.randrange(height - h + 1), draw.randrange(width - w + 1), h, w
    ratio = width / height
    w = width if ratio < 4 / 3 else round(height * 4 / 3)
    h = height if ratio > 3 / 4 else round(width / (3 / 4))
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("shape", [(375, 500), (500, 333), (64, 64), (100, 320)])
def test_boxes_are_distributed_as_those_of_torchvision(shape: tuple[int, int]) -> None:
    from scipy.stats import ks_2samp  # takes a second, which every collection would spend

    generator, draw, count = rng(1), random.Random(2), 4000
    boxes = [random_box(*shape, (0.08, 1.0), (3 / 4, 4 / 3), generator) for _ in range(count)]
    ours = np.array([(b.top, b.left, b.height, b.width) for b in boxes])
    theirs = np.array([by_torchvision(*shape, draw) for _ in range(count)])

    def described(found: np.ndarray) -> list[np.ndarray]:
        top, left, height, width = found.T
        down = top / np.maximum(shape[0] - height, 1)
        across = left / np.maximum(shape[1] - width, 1)
        return [height * width / (shape[0] * shape[1]), np.log(width / height), down, across]

    for one, other in zip(described(ours), described(theirs), strict=True):
        assert ks_2samp(one, other).pvalue > 0.001


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 9))
def test_boxes_are_within_the_image(height: int, width: int, seed: int) -> None:
    box = random_box(height, width, (0.08, 1.0), (3 / 4, 4 / 3), rng(seed))
    assert box.top >= 0 < box.height
    assert box.left >= 0 < box.width
    assert box.top + box.height <= height
    assert box.left + box.width <= width
    assert {type(n) for n in (box.top, box.left, box.height, box.width)} == {int}


# -- batches, pipelines


def test_batches_are_made_image_by_image() -> None:
    images = [forms()["4:2:0"], forms()["PNG"], ROWS]
    made = random_resized_crop(16, flip_p=0.5)(images, rng())
    generator = rng()
    each = [random_resized_crop(16, flip_p=0.5)(image, generator) for image in images]
    assert np.array_equal(made, np.stack(each))
    assert len({image.tobytes() for image in made}) == 3
    stacked = np.stack([ROWS, ROWS[::-1]])
    assert np.array_equal(center_crop(8)(stacked), stacked[:, 34:42, 46:54])


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (2, "thread"), (1, "process")])
def test_it_is_a_whole_preparation(tmp_path: Path, workers: int, kind: str) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number, name in enumerate(["4:2:0", "progressive", "grey", "cmyk"]):
            (tmp_path / label / f"{number}.jpg").write_bytes(forms()[name])
    crop = random_resized_crop(24, flip_p=0.5)
    train = stoker.from_folder(str(tmp_path), seed=3).shuffle().random_map(crop, on="image")
    train = train.batch(4)
    assert "random_map(random_resized_crop(24), on='image')" in str(train)
    expected = [batch.image for batch in train.workers(0)]
    batches = [batch.image for batch in train.workers(workers, kind=kind)]
    assert [image.shape for image in batches] == [(4, 24, 24, 3)] * 2
    assert all(np.array_equal(a, b) for a, b in zip(batches, expected, strict=True))


@stoker.thread_safe
def one_by_one(image: Any, rng: np.random.Generator) -> Any:
    return random_resized_crop(16, flip_p=0.5)(image, rng)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_a_chunk_are_each_what_they_are_alone(workers: int) -> None:
    damaged = {"cut": FILES["rgb"][:-300], "text": "no image", "no JPEG": b"\xff\xd8\xff"}
    images = [*forms().values(), *damaged.values()]

    def stream(fn: Any, max_errors: Any) -> Any:
        source = stoker.from_dataset(
            list(enumerate(images)), seed=0, max_errors=max_errors
        ).shuffle()
        made = source.random_map(fn, on=1).batch(8).workers(workers)
        found, error = [], None
        try:
            for _ in range(3):  # of the first calls each is looked at by itself
                found += [(numbers.tolist(), rows.tobytes()) for numbers, rows in made]
        except stoker.StageError as caught:
            error = caught.index, str(caught.__cause__)
        return found, sorted((each.index, each.cause) for each in made.stats().skips), error

    together = random_resized_crop(16, flip_p=0.5)
    for max_errors in (0, len(damaged)):
        assert stream(together, max_errors) == stream(one_by_one, max_errors)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("how", [{}, {"strict": True}])
def test_files_are_turned_if_that_is_asked_for(kind: str, how: Any) -> None:
    crops: list[tuple[Any, Any]] = [
        (random_resized_crop(16, orient=True, **how), random_resized_crop(16)),
        (random_crop(16, orient=True, **how), random_crop(16)),
        (center_crop(40, orient=True, **how), center_crop(40)),
        (
            resize_center_crop(resize=20, crop=16, orient=True, **how),
            resize_center_crop(resize=20, crop=16),
        ),
        (resize(16, orient=True), resize(16)),
    ]
    files = []
    for turn in (6, 3, 1):
        exif = Image.Exif()
        exif[0x0112] = turn
        files.append(encoded(ROWS, kind, exif=exif))
    for turned, plain in crops:
        source = stoker.from_dataset(files, seed=0)
        upright = source.map(functools.partial(decode, orient=True))
        is_random = turned.name.startswith("random")
        found = source.random_map(turned) if is_random else source.map(turned)
        expected = upright.random_map(plain) if is_random else upright.map(plain)
        for a, b, file in zip(found.workers(0), expected.workers(0), files, strict=True):
            assert a.shape == b.shape
            # Of a part of a JPEG the edges differ by a level or two.
            assert levels_apart(a, b) <= 2, file[:4]


@pytest.mark.parametrize("crop", [resize(9), center_crop(9), resize_center_crop(resize=12, crop=9)])
def test_they_pickle(crop: Any) -> None:
    assert np.array_equal(pickle.loads(pickle.dumps(crop))(ROWS), crop(ROWS))


@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels(channels: int) -> None:
    rows = np.ascontiguousarray(np.repeat(ROWS[..., :1], channels, -1))
    rows[..., -1] //= 2
    made = resize((20, 30))(rows)
    assert made.shape == (20, 30, channels)
    for at in range(channels):
        whole = np.repeat(rows[..., at, None], 3, -1)
        expected = by_hand(whole, (0, 0, 77, 101), (20, 30))
        assert levels_apart(made[..., at], expected[..., 0]) <= 1


# -- damage and wrong arguments


def test_damage_that_a_crop_does_not_read_is_seen_in_strict_mode_only(backend: str) -> None:  # noqa: F811
    data = encoded(ROWS, subsampling=2)
    data = data[: len(data) * 3 // 4]
    crop = random_crop((8, 101))  # at the top, with this generator

    class Lowest(np.random.Generator):
        def random(self, *_: Any, **__: Any) -> Any:
            return 0.0

    top = Lowest(np.random.PCG64())
    with pytest.raises(OSError, match=r"ends early|truncated"):
        random_crop((8, 101), strict=True)(data, top)
    if backend == "stoker-native":
        assert crop(data, top).shape == (8, 101, 3)
    else:  # decodes in full anyway
        with pytest.raises(OSError, match="truncated"):
            crop(data, top)


@every_form
@pytest.mark.parametrize("scaled", [False, True])
def test_strict_pixels_are_the_same(form: str, scaled: bool) -> None:
    image = forms()[form]
    crop = random_resized_crop(9, dct_scaling=scaled)
    strict = random_resized_crop(9, strict=True, dct_scaling=scaled)
    for seed in (0, 1):
        np.testing.assert_array_equal(strict(image, rng(seed)), crop(image, rng(seed)))


@every_form
def test_larger_images_than_allowed_are_refused(form: str) -> None:
    image = forms()[form]
    if isinstance(image, np.ndarray):
        assert resize(8, max_pixels=5)(image).shape == (8, 10, 3)
        return
    for crop in (
        lambda x: random_resized_crop(8, max_pixels=7776)(x, rng()),
        lambda x: random_crop(8, max_pixels=7776)(x, rng()),
        resize(8, max_pixels=7776),
        center_crop(8, max_pixels=7776),
        resize_center_crop(resize=9, crop=8, max_pixels=7776),
    ):
        with pytest.raises(ValueError, match="101 x 77 pixels: more than 7776"):
            crop(image)


def test_generators_of_a_device_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"not a Generator: put this stage before \.to_torch\(\)"):
        random_resized_crop(8)(ROWS, torch.Generator())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: resize(0), "a size must be"),
        (lambda: center_crop((3, 4, 5)), "a size must be"),
        (lambda: random_crop((8, 0)), "a size must be"),
        (lambda: random_crop(8, -1), "padding="),
        (lambda: random_resized_crop(8, scale=(0.0, 1.0)), "scale="),
        (lambda: random_resized_crop(8, ratio=(2.0, 1.0)), "ratio="),
        (lambda: random_resized_crop(8, scale=(0.5, float("inf"))), "scale="),
        (lambda: random_resized_crop(8, max_pixels=None), "max_pixels="),  # type: ignore[arg-type]
        (lambda: resize(8, max_pixels=0), "max_pixels="),
        (lambda: random_resized_crop(8, flip_p="x"), "flip_p="),  # type: ignore[arg-type]
        (lambda: random_resized_crop(8, flip_p=1.5), "flip_p="),
        (lambda: resize_center_crop(resize=8, crop=9), "does not fit"),
    ],
)
def test_wrong_arguments_are_refused(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


@every_form
def test_numbers_of_numpy_are_numbers(form: str) -> None:
    image = forms()[form]
    size: Any = np.int64(20)
    given: Any = {
        "flip_p": np.float32(0.5),
        "antialias": np.True_,
        "max_pixels": np.int64(10**6),
        "scale": (np.float32(0.25), np.float64(1)),
    }
    plain: Any = {"flip_p": 0.5, "antialias": True, "max_pixels": 2**70, "scale": (0.25, 1.0)}
    made = random_resized_crop(size, **given)(image, rng(5))
    assert np.array_equal(made, random_resized_crop(20, **plain)(image, rng(5)))


def test_flips_of_one_image_and_of_many() -> None:
    assert np.array_equal(hflip(ROWS), ROWS[:, ::-1])
    assert np.array_equal(hflip(np.stack([ROWS, ROWS])), np.stack([ROWS, ROWS])[:, :, ::-1])
