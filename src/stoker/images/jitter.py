"""Random changes of colour, equal to those of torchvision's ``ColorJitter``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.validate import is_number
from stoker.images.decoding import check_is_no_image
from stoker.images.image_map import RandomImageMap
from stoker.images.resampling import Pixels, Reading

Strength = float | tuple[float, float] | list[float]
Range = tuple[float, float] | None
Colours = NDArray[np.float32]  # from 0 to 255


def color_jitter(
    brightness: Strength = 0.0,
    contrast: Strength = 0.0,
    saturation: Strength = 0.0,
    hue: Strength = 0.0,
) -> RandomImageMap:
    """Change brightness, contrast, saturation and hue by random factors, in random order.

    Args:
        brightness, contrast, saturation: the largest distance of the factor from 1, such as 0.4; or
            the smallest and largest factor.
        hue: the largest turn of the hue, as a fraction of the colour circle up to 0.5; or the
            smallest and largest turn, from -0.5 to 0.5.

    Returns:
        A function for ``.random_map(fn, on="image")``. It takes ``uint8 [height, width, 3]``, such
        an image still encoded, or a batch of either, and returns ``uint8``.

    Raises:
        TypeError: an argument is an image.
        ValueError: a factor could be below 0, or a hue beyond half the circle.
    """
    check_is_no_image(
        brightness, "strengths", ".random_map(stoker.images.color_jitter(0.4), on='image')"
    )
    factors = {
        "brightness": _factors("brightness", brightness),
        "contrast": _factors("contrast", contrast),
        "saturation": _factors("saturation", saturation),
        "hue": _turns(hue),
    }
    active = {name: limits for name, limits in factors.items() if limits is not None}
    return RandomImageMap("color_jitter", partial(_jitter, factors=active))


def _jitter(
    image: Any, *, rng: np.random.Generator, factors: dict[str, tuple[float, float]]
) -> Pixels:
    opened = Reading().pixels(image)
    if opened.shape[2] != 3:
        raise ValueError(f"color_jitter needs RGB images, not {opened.shape[2]} channels")
    colours = opened.astype(np.float32)
    names = list(factors)
    factors_drawn = {
        name: low + (high - low) * rng.random() for name, (low, high) in factors.items()
    }
    for at in rng.permutation(len(names)):
        name = names[at]
        colours = np.clip(_CHANGES[name](colours, np.float32(factors_drawn[name])), 0, 255)
    return colours.round().astype(np.uint8)


def _brighten(colours: Colours, factor: np.float32) -> Colours:
    return colours * factor


def _change_contrast(colours: Colours, factor: np.float32) -> Colours:
    return colours * factor + np.float32(_grey(colours).mean()) * (1 - factor)


def _saturate(colours: Colours, factor: np.float32) -> Colours:
    return colours * factor + _grey(colours)[..., None] * (1 - factor)


def _grey(colours: Colours) -> Colours:
    red, green, blue = colours[..., 0], colours[..., 1], colours[..., 2]
    # Luma of ITU-R BT.601, as in Pillow and torchvision.
    grey: Colours = 0.299 * red + 0.587 * green + 0.114 * blue
    return grey


def _turn_hue(colours: Colours, turn: np.float32) -> Colours:
    """Turn the hue in HSV. The largest and smallest channel stay, so value and saturation do."""
    high, low = colours.max(-1), colours.min(-1)
    span = high - low
    red, green, blue = colours[..., 0], colours[..., 1], colours[..., 2]
    safe = np.where(span > 0, span, 1)
    sixth = np.where(
        high == red,
        (green - blue) / safe,
        np.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixth += 6 * turn
    # Each channel is the same function of the hue, a third of the circle further on.
    out = np.empty_like(colours)
    for channel, ahead in enumerate((5, 3, 1)):
        k = (sixth + ahead) % 6
        out[..., channel] = high - span * np.clip(np.minimum(k, 4 - k), 0, 1)
    return out


_CHANGES: dict[str, Callable[[Colours, np.float32], Colours]] = {
    "brightness": _brighten,
    "contrast": _change_contrast,
    "saturation": _saturate,
    "hue": _turn_hue,
}


def _factors(name: str, value: Strength) -> Range:
    if is_number(value):
        low, high = max(0.0, 1 - value), 1 + value
    else:
        low, high = _pair(value)
    if not 0 <= low <= high < math.inf:
        raise ValueError(
            f"{name}= must be a number from 0 on, or the smallest and largest factor, not {value!r}"
        )
    return None if low == high == 1 else (low, high)


def _turns(value: Strength) -> Range:
    low, high = (-value, value) if is_number(value) else _pair(value)
    if not -0.5 <= low <= high <= 0.5:
        raise ValueError(
            f"hue= must be at most 0.5, or two numbers from -0.5 to 0.5, not {value!r}"
        )
    return None if low == high == 0 else (low, high)


def _pair(value: Any) -> tuple[float, float]:
    """Return a pair of numbers; for other values, a pair that the caller refuses."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return (value[0], value[1]) if is_pair and all(map(is_number, value)) else (1, -1)
