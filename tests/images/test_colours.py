"""Colours as torchvision and Pillow change them; what a network takes."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from encoded_images import encoded, levels_apart, photograph
from PIL import Image, ImageEnhance

from stoker.images import color_jitter, decode, normalize, to_chw

ROWS = photograph(20, 31)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_factors_do_what_pillow_does(name: str, factor: float) -> None:
    kinds = {"brightness": "Brightness", "contrast": "Contrast", "saturation": "Color"}
    enhanced = getattr(ImageEnhance, kinds[name])(Image.fromarray(ROWS)).enhance(factor)
    made = color_jitter(**{name: (factor, factor)})(ROWS, rng())
    assert made.dtype == np.uint8
    # Pillow cuts to whole numbers, of a mean and a grey that it has rounded.
    assert levels_apart(made, np.array(enhanced)) <= 2


@pytest.mark.parametrize("turn", [-0.5, -0.2, 0.0, 0.1, 0.5])
def test_hues_turn_in_hsv(turn: float) -> None:
    made = color_jitter(hue=(turn, turn))(ROWS, rng())
    for row, column in [(0, 0), (3, 17), (19, 30), (8, 8)]:
        hue, saturation, value = colorsys.rgb_to_hsv(*(ROWS[row, column] / 255.0))
        expected = np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)) * 255
        assert np.abs(made[row, column] - expected).max() <= 1
    grey = np.full((2, 2, 3), 77, np.uint8)
    assert np.array_equal(color_jitter(hue=0.5)(grey, rng()), grey)


def test_everything_at_once_is_drawn_anew() -> None:
    jitter = color_jitter(0.4, 0.4, 0.4, 0.1)
    assert np.array_equal(jitter(ROWS, rng(5)), jitter(ROWS, rng(5)))
    assert len({jitter(ROWS, rng(seed)).tobytes() for seed in range(9)}) == 9
    several = jitter([encoded(ROWS, "PNG"), ROWS], rng())
    assert several.shape == (2, 20, 31, 3)
    assert not np.array_equal(several[0], several[1])
    assert np.array_equal(color_jitter()(ROWS, rng()), ROWS)
    data = encoded(ROWS)
    assert np.array_equal(color_jitter(0.3)(data, rng()), color_jitter(0.3)(decode(data), rng()))


def test_factors_are_uniform() -> None:
    flat = np.full((1, 1, 3), 100, np.uint8)
    jitter, generator = color_jitter(brightness=0.5), rng()
    found = np.array([jitter(flat, generator)[0, 0, 0] for _ in range(2000)])
    assert found.min() >= 50
    assert found.max() <= 150
    assert np.abs(np.histogram(found, bins=4, range=(50, 150))[0] - 500).max() < 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"brightness": -1},
        {"brightness": math.inf},
        {"contrast": (2.0, 1.0)},
        {"hue": 0.6},
        {"saturation": (-1, 1)},
    ],
)
def test_wrong_factors_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        color_jitter(**wrong)


def test_colours_are_those_of_rgb() -> None:
    with pytest.raises(ValueError, match="not 1 channels"):
        color_jitter(0.5)(ROWS[..., :1], rng())


def test_normalizing() -> None:
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.2, 0.25, 0.3])
    expected = (ROWS / 255.0 - mean) / std
    fn = normalize(mean.tolist(), std.tolist())
    assert fn(ROWS).dtype == np.float32
    assert np.allclose(fn(ROWS), expected, atol=1e-5)
    assert np.allclose(fn(np.stack([ROWS, ROWS]))[1], expected, atol=1e-5)
    assert np.allclose(fn(to_chw(ROWS)), np.moveaxis(expected, -1, 0), atol=1e-5)
    assert np.allclose(fn(ROWS / 255.0), expected, atol=1e-5)
    assert np.allclose(fn(torch.from_numpy(ROWS / 255.0)), expected, atol=1e-5)
    with pytest.raises(ValueError, match="three axes"):
        to_chw(ROWS[0])
    with pytest.raises(ValueError, match="3 means"):
        fn(ROWS[..., :2])
    with pytest.raises(ValueError, match="as many means"):
        normalize([0.5], [0.1, 0.2])
    with pytest.raises(ValueError, match="above 0"):
        normalize([0.5], [math.nan])
    with pytest.raises(TypeError, match="for each channel"):
        normalize(0.5, 0.2)  # type: ignore[arg-type]
    assert np.array_equal(normalize(mean, std)(ROWS), fn(ROWS))


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, bool])
def test_only_bytes_and_floating_point_are_normalized(dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"or floating point, not {np.dtype(dtype)}"):
        normalize()(ROWS.astype(dtype))
