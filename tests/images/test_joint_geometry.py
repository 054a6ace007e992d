"""``on=["image", "mask", "boxes"]``: one window for an image, its masks and its boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from encoded_images import FILES, encoded, photograph
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import stoker
from backends import backend  # noqa: F401 - for every test here
from stoker import images
from stoker.basics.pytree import Together
from stoker.images.cropping import random_box

ROWS, COLUMNS = 77, 101
PHOTOGRAPH = photograph(ROWS, COLUMNS)
EVERY = ["image", "mask", "boxes"]
Example = dict[str, Any]

MAPS: dict[str, Any] = {
    "resize": images.resize((50, 40)),
    "resize shorter side": images.resize(60),
    "center_crop": images.center_crop((40, 130)),
    "resize_center_crop": images.resize_center_crop(resize=60, crop=(48, 40)),
    "hflip": images.hflip,
}
RANDOM_MAPS: dict[str, Any] = {
    "random_crop": images.random_crop((60, 50), padding=8),
    "random_resized_crop": images.random_resized_crop((40, 48), flip_p=0.5),
    "random_hflip": images.random_hflip,
}


def example(seed: int = 0) -> Example:
    draw = np.random.default_rng(seed)
    boxes = np.sort(draw.uniform(0, [COLUMNS, ROWS], (5, 2, 2)), axis=1).reshape(5, 4)
    return {
        "image": PHOTOGRAPH,
        "mask": draw.integers(0, 1000, (ROWS, COLUMNS)),
        "boxes": boxes.astype(np.float32),
        "label": seed,
    }


def changed(fn: Any, *examples: Example, on: Any = EVERY, seed: int = 0) -> list[Example]:
    data = stoker.from_dataset(list(examples), seed=seed)
    with_fn = data.random_map(fn, on=on) if fn in RANDOM_MAPS.values() else data.map(fn, on=on)
    return list(with_fn)


every_map = pytest.mark.parametrize("name", [*MAPS, *RANDOM_MAPS])


def map_of(name: str) -> Any:
    return {**MAPS, **RANDOM_MAPS}[name]


@every_map
def test_the_image_is_what_it_is_alone(name: str) -> None:
    for seed in range(3):
        (alone,) = changed(map_of(name), example(), on="image", seed=seed)
        (made,) = changed(map_of(name), example(), seed=seed)
        assert np.array_equal(made["image"], alone["image"])
        assert (made["mask"].shape, made["mask"].dtype) == (made["image"].shape[:2], np.int64)
        assert (made["boxes"].shape, made["boxes"].dtype) == ((5, 4), np.float32)
        assert made["label"] == 0


@every_map
def test_a_mask_and_a_box_stay_on_what_they_are_about(name: str) -> None:
    """An object that is painted black, its mask and its box: after all that comes, one place."""
    left, top, right, bottom = 30, 20, 70, 55
    canvas = np.full((ROWS, COLUMNS, 1), 255, np.uint8)
    canvas[top:bottom, left:right] = 1
    mask = canvas[:, :, 0] == 1
    boxes = np.array([[left, top, right, bottom]])
    for seed in range(5):
        (made,) = changed(map_of(name), {"image": canvas, "mask": mask, "boxes": boxes}, seed=seed)
        is_object = np.abs(made["image"][:, :, 0].astype(int) - 1) < 100
        is_border = made["image"][:, :, 0] == 0
        wrong = (is_object & ~is_border) != made["mask"]
        # Smooth and nearest pixels may differ along the object's border alone.
        assert wrong.sum() <= 2 * sum(made["mask"].shape)
        assert made["boxes"].dtype == np.float32
        if made["mask"].any():
            found = [np.flatnonzero(made["mask"].any(axis)) for axis in (0, 1)]
            bounds = [found[0][0], found[1][0], found[0][-1] + 1, found[1][-1] + 1]
            assert np.abs(made["boxes"][0] - bounds).max() <= 1


def test_crops_and_flips_move_masks_as_they_move_pixels() -> None:
    grey = PHOTOGRAPH[:, :, :1]
    for fn in (
        MAPS["center_crop"],
        MAPS["hflip"],
        RANDOM_MAPS["random_crop"],
        RANDOM_MAPS["random_hflip"],
    ):
        for seed in range(4):
            one = {"image": grey, "mask": grey[:, :, 0], "parts": PHOTOGRAPH.astype(np.float64)}
            (made,) = changed(fn, one, on=["image", "mask", "parts"], seed=seed)
            assert np.array_equal(made["mask"], made["image"][:, :, 0])
            assert np.array_equal(made["parts"][:, :, 0], made["mask"])


@given(st.integers(1, 90), st.integers(1, 90), st.integers(0, 2**32 - 1), st.booleans())
def test_a_resized_mask_has_the_nearest_pixels_as_pillow_has(
    height: int, width: int, seed: int, flips: bool
) -> None:
    values = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS)
    crop = images.random_resized_crop((height, width), flip_p=float(flips))
    both = Together((PHOTOGRAPH, values))
    made = crop(both, np.random.default_rng(seed))[1]
    if flips:
        made = made[:, ::-1]
    box = random_box(ROWS, COLUMNS, (0.08, 1.0), (3 / 4, 4 / 3), np.random.default_rng(seed))
    top, left, down, across = (int(x) for x in (box.top, box.left, box.height, box.width))
    cut = Image.fromarray(values[top : top + down, left : left + across])
    expected = np.array(cut.resize((width, height), Image.Resampling.NEAREST))
    # Where the centre of a pixel lies on an edge of two, Pillow takes either.
    rows, columns = (2 * np.arange(n) + 1 for n in (height, width))
    clear = np.ix_(rows * down % (2 * height) != 0, columns * across % (2 * width) != 0)
    assert np.array_equal(made[clear], expected[clear])
    assert np.array_equal(made[:, 0] // COLUMNS, top + rows * down // (2 * height))


# -- in a pipeline


def prepared(n: int = 24) -> stoker.Pipeline[Any]:
    return stoker.from_dataset([example(i) for i in range(n)], seed=3).shuffle()


def jointly(data: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
    return (
        data.random_map(images.random_resized_crop((32, 40), flip_p=0.5), on=EVERY)
        .random_map(images.random_hflip, on=EVERY)
        .random_map(images.random_crop(24), on=EVERY)
    )


def same(one: list[Example], other: list[Example]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a
    )


@pytest.mark.parametrize("echo", [1, 3])
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_it_is_the_same_for_any_workers(kind: Any, echo: int) -> None:
    train = jointly(prepared().echo(echo)).batch(5)
    alone = list(train)
    assert [alone[0][key].shape for key in EVERY] == [(5, 24, 24, 3), (5, 24, 24), (5, 5, 4)]
    assert same(list(jointly(prepared().echo(echo)).batch(5).workers(2, kind=kind)), alone)


def test_it_goes_on_after_a_resume() -> None:
    whole = list(jointly(prepared().echo(2)).batch(5))
    first = jointly(prepared().echo(2)).batch(5)
    batches = iter(first)
    seen = [next(batches) for _ in range(4)]
    state = first.state_dict()
    second = jointly(prepared().echo(2)).batch(5).workers(2)
    second.load_state_dict(state)
    assert same([*seen, *second], whole)


def test_uses_of_an_echo_differ_and_leave_what_the_pool_keeps() -> None:
    data = [example(i) for i in range(3)]
    kept = [{key: np.copy(each[key]) for key in EVERY} for each in data]
    uses = list(jointly(stoker.from_dataset(data, seed=0).echo(4)))
    masks = {(use["label"], use["mask"].tobytes()) for use in uses}
    assert len(masks) == 12
    assert same([{key: each[key] for key in EVERY} for each in data], kept)


def test_files_are_cropped_with_their_masks() -> None:
    for name, data in [*FILES.items(), ("png", encoded(PHOTOGRAPH, "PNG"))]:
        one = example() | {"image": data}
        (made,) = changed(RANDOM_MAPS["random_resized_crop"], one)
        (expected,) = changed(RANDOM_MAPS["random_resized_crop"], example())
        assert np.array_equal(made["mask"], expected["mask"]), name


@pytest.mark.parametrize("holds", [np.stack, list])
@every_map
def test_a_batch_is_changed_as_its_images_are(name: str, holds: Callable[..., Any]) -> None:
    if holds is list and "flip" in name:
        return  # of lists, flips take none
    fn, rows = map_of(name), [example(i) for i in range(4)]
    batch = Together(holds([row[key] for row in rows]) for key in EVERY)
    rng = [[np.random.default_rng(1)] if fn in RANDOM_MAPS.values() else [] for _ in range(2)]
    made = fn(batch, *rng[0])
    if name == "random_hflip":  # one draw for all
        flipped = [np.array_equal(a, b[:, ::-1]) for a, b in zip(made[0], batch[0], strict=True)]
        assert 0 < sum(flipped) < 4
        for at, is_flipped in enumerate(flipped):
            one = Together(each[at] for each in batch)
            expected = images.hflip(one) if is_flipped else one
            assert all(np.array_equal(a[at], b) for a, b in zip(made, expected, strict=True))
        return
    singles = [fn(Together(row[key] for key in EVERY), *rng[1]) for row in rows]
    for column, expected in zip(made, zip(*singles, strict=True), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(column, expected, strict=True))
    assert isinstance(made[1], list) == (holds is list)


def test_images_on_a_device_are_flipped_with_their_masks_and_boxes() -> None:
    pixels = torch.arange(6 * 3 * 8 * 10, dtype=torch.float32).reshape(6, 3, 8, 10)
    masks = pixels[:, 0].long()
    deep = pixels[:, :2].clone()
    boxes = torch.tensor([[[1, 2, 4, 5], [0, 0, 10, 8]]] * 6)
    data = stoker.from_arrays(pixels.numpy(), masks.numpy(), deep.numpy(), boxes.numpy(), seed=0)
    flipping = data.batch(6).to_torch().random_map(images.random_hflip, on=[0, 1, 2, 3])
    (made,) = flipping
    flipped = made[0][:, 0, 0, 0] > made[0][:, 0, 0, 9]
    assert 0 < flipped.sum() < 6
    for at in range(6):
        turn = (lambda x: x.flip(-1)) if flipped[at] else (lambda x: x)
        for image, before in zip(made[:3], (pixels, masks, deep), strict=True):
            assert torch.equal(image[at], turn(before[at]))
        left = [6.0, 0.0] if flipped[at] else [1.0, 0.0]
        assert made[3][at, :, 0].tolist() == left
        assert made[3][at, :, 2].tolist() == ([9.0, 10.0] if flipped[at] else [4.0, 10.0])


# -- functions of the user's


def test_a_function_gets_a_tuple_of_fields_and_returns_as_many() -> None:
    data = stoker.from_arrays(np.arange(10), np.arange(10) * 10, np.arange(10) * 100, seed=0)
    swapped = data.map(lambda fields: fields[::-1], on=[0, 2]).batch(10)
    (batch,) = swapped
    assert [part[3] for part in batch] == [300, 30, 3]
    assert "on=[0, 2]" in str(swapped)
    chosen = data.filter(lambda fields: fields[0] + fields[1] > 77, on=(0, 1))
    assert [int(x) for x, *_ in chosen] == [8, 9]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda _: 3, "returned one int: with on= of 2 fields"),
        (lambda fields: [*fields, 1], "returned 3 values: with on= of 2 fields"),
        (lambda fields: (fields[0], None), "returned None: return the field"),
    ],
)
def test_what_a_function_returns_must_fit(made: Any, message: str) -> None:
    data = stoker.from_arrays(np.arange(4), np.arange(4), seed=0).map(made, on=[0, 1])
    with pytest.raises(stoker.StageError, match=message):
        next(iter(data))


@pytest.mark.parametrize(
    ("on", "error", "message"),
    [
        ([], ValueError, "different fields in a list"),
        ([0, 0], ValueError, "different fields in a list"),
        ([0, 1.5], TypeError, "or a list of them"),
        ([[0, 1]], TypeError, "or a list of them"),
        ([0, 7], LookupError, "no field 7"),
    ],
)
def test_fields_that_cannot_be_are_refused_at_once(on: Any, error: Any, message: str) -> None:
    data = stoker.from_arrays(np.arange(4), np.arange(4), seed=0)
    for method in (data.map, data.filter):
        with pytest.raises(error, match=message):
            method(lambda fields: fields, on=on)


def test_a_module_of_torch_gets_a_plain_tuple() -> None:
    class Pair(torch.nn.Module):
        def forward(self, pair: Any) -> Any:
            assert type(pair) is tuple
            return pair[0] + torch.rand(()), pair[1]

    data = stoker.from_arrays(np.zeros((4, 3)), np.arange(4), seed=0).batch(2).to_torch()
    for with_module in (data.map(Pair(), on=[0, 1]), data.random_map(Pair(), on=[0, 1])):
        assert next(iter(with_module))[0].max() > 0


# -- what is refused


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (np.zeros((30, 30)), r"field 2 of on= has \[30, 30\], which is no mask of the image, 77"),
        (np.zeros(4), r"no boxes, \[n, 4\]"),
        (b"png", "decode masks before, such as by numpy"),
        ([[1, 2, 3, 4]], r"not list: convert it in a .map\(\)"),
        (torch.zeros(1, 4), r"must be an array, a mask or boxes, not Tensor: convert it"),
    ],
)
@every_map
def test_what_is_neither_mask_nor_boxes_is_refused(name: str, field: Any, message: str) -> None:
    one = {"image": PHOTOGRAPH, "mask": field}
    with pytest.raises(stoker.StageError, match=message):
        changed(map_of(name), one, on=["image", "mask"])


def test_what_could_be_a_mask_or_boxes_is_refused() -> None:
    both = Together((np.zeros((6, 4, 3), np.uint8), np.zeros((6, 4))))
    for fn in (images.center_crop(2), images.hflip):
        with pytest.raises(ValueError, match=r"6 boxes\. Give masks a last axis of 1"):
            fn(both)
    mask = np.zeros((6, 4, 1))
    assert images.center_crop(2)(Together((both[0], mask)))[1].shape == (2, 2, 1)


def test_batches_that_do_not_fit_are_refused() -> None:
    stack = np.stack([PHOTOGRAPH] * 3)
    for fields in ((stack, np.zeros((2, ROWS, COLUMNS))), (stack, ROWS)):
        with pytest.raises(TypeError, match=r"for each of 3 images: put this stage before .batch"):
            images.center_crop(5)(Together(fields))


def test_colours_are_changed_of_images_alone() -> None:
    with pytest.raises(TypeError, match="changes colours alone: give on= the name of the image"):
        images.color_jitter(0.4)(Together((PHOTOGRAPH, PHOTOGRAPH)), np.random.default_rng(0))
