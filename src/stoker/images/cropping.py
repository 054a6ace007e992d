"""Crops and sizes, equal to torchvision's transforms of the same names.

Each function here returns a transform for ``.map()`` or ``.random_map()``. The transform takes an
image, encoded (``bytes``) or decoded (``uint8 [height, width, channels]``), and returns a new
``uint8`` image. It also takes a batch, a list of images or ``uint8 [n, height, width, channels]``,
and returns one array. With ``on=["image", "mask", "boxes"]`` it changes masks and boxes as it does
the image: see ``geometry``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stoker.basics.pytree import Together
from stoker.basics.validate import is_number, is_whole_number
from stoker.images.decoding import MAX_PIXELS, check_is_no_image
from stoker.images.geometry import Box, ImageWindow
from stoker.images.image_map import Address, ImageMap, Many, RandomImageMap
from stoker.images.resampling import Opened, Pixels, Reading, Resizing, size_of

# The most boxes that are drawn until one fits: as in torchvision's RandomResizedCrop, so that crops
# have the same distribution.
_MAX_TRIES = 10

Size = int | Sequence[int]


# -- the transforms


def random_resized_crop(
    size: Size,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    *,
    flip_p: float = 0.0,
    antialias: bool = True,
    dct_scaling: bool = False,
    strict: bool = False,
    max_pixels: int = MAX_PIXELS,
    orient: bool = False,
) -> RandomImageMap:
    """Crop at random, and resize: the usual training transform for photographs.

    Boxes are drawn as in torchvision's ``RandomResizedCrop``: area and aspect ratio, up to ten
    times until the box fits; otherwise the largest box in the middle. With ``stoker-native``, only
    the box of a JPEG is decoded.

    Example: ``.random_map(stoker.images.random_resized_crop(224, flip_p=0.5), on="image")``

    Args:
        size: the size of the result: one number, or height and width.
        scale: the smallest and largest area of the box, as a fraction of the image's area.
        ratio: the smallest and largest width of the box over its height; its logarithm is uniform.
        flip_p: the probability of a flip left to right. It costs no time here.
        antialias: whether shrinking a box uses all pixels, as in Pillow's ``resize``, or only the
            nearest two of each row and column.
        dct_scaling: whether a JPEG of at least twice the size may be decoded at 1/2, 1/4 or 1/8.
            This is faster for large photographs, but changes the pixels. It needs
            ``stoker-native``.
        strict: whether files are decoded in full. Otherwise damage of a JPEG outside the box goes
            unnoticed.
        max_pixels: images with more pixels are refused, as in ``decode``.
        orient: whether to turn a file by its EXIF orientation first. A file that is turned is
            decoded in full.

    Returns:
        A function for ``.random_map(fn, on="image")``. It raises TypeError or ValueError for values
        that are not images, and the errors of ``decode``.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    height, width = _size(size)
    _check_range("scale", scale)
    _check_range("ratio", ratio)
    _check_probability("flip_p", flip_p)
    how: dict[str, Any] = {"scale": scale, "ratio": ratio, "flip_p": flip_p}
    how["size"] = height, width
    reading = Reading(strict, max_pixels, bool(orient))
    resizing = Resizing(bool(antialias), False, bool(dct_scaling))
    fn = _resized(partial(_random_resized_window, **how), reading, resizing)
    many = partial(_many_random, reading=reading, resizing=resizing, how=how)
    return RandomImageMap(f"random_resized_crop({_size_text(size)})", fn, many)


def random_crop(
    size: Size,
    padding: int = 0,
    *,
    strict: bool = False,
    max_pixels: int = MAX_PIXELS,
    orient: bool = False,
) -> RandomImageMap:
    """Crop at a random place.

    Args:
        size: the size of the result: one number, or height and width.
        padding: the width in pixels of a black border around the image.
        strict, max_pixels, orient: as in ``random_resized_crop``.

    Returns:
        A function for ``.random_map(fn, on="image")``. It raises ValueError if an image with its
        padding is smaller than the crop.
    """
    height, width = _size(size)
    if not is_whole_number(padding) or padding < 0:
        raise ValueError(f"padding= must be a number of pixels, not {padding!r}")
    place = partial(_random_window, size=(height, width), padding=padding)
    fn = _cropped(place, Reading(strict, max_pixels, bool(orient)))
    return RandomImageMap(f"random_crop({_size_text(size)})", fn)


def resize(
    size: Size, *, antialias: bool = True, max_pixels: int = MAX_PIXELS, orient: bool = False
) -> ImageMap:
    """Resize whole images.

    Args:
        size: the length of the shorter side (the other one is in proportion), or height and width.
        antialias, max_pixels, orient: as in ``random_resized_crop``. An image is also refused if
            its result would have more pixels.

    Returns:
        A function for ``.map(fn, on="image")``.
    """
    sides = int(size) if is_whole_number(size) else _size(size)
    _size(size)
    place = partial(_whole_window, size=sides, max_pixels=max_pixels)
    fns = _resized_alike(
        place, Reading(False, max_pixels, bool(orient)), Resizing(bool(antialias), False, False)
    )
    return ImageMap(f"resize({_size_text(size)})", *fns)


def center_crop(
    size: Size, *, strict: bool = False, max_pixels: int = MAX_PIXELS, orient: bool = False
) -> ImageMap:
    """Crop the middle; smaller images get a black border.

    Args:
        size: the size of the result: one number, or height and width.
        strict, max_pixels, orient: as in ``random_resized_crop``.

    Returns:
        A function for ``.map(fn, on="image")``.
    """
    fn = _cropped(
        partial(_center_window, size=_size(size)), Reading(strict, max_pixels, bool(orient))
    )
    return ImageMap(f"center_crop({_size_text(size)})", fn)


def resize_center_crop(
    resize: int,
    crop: Size,
    *,
    antialias: bool = True,
    dct_scaling: bool = False,
    strict: bool = False,
    max_pixels: int = MAX_PIXELS,
    orient: bool = False,
) -> ImageMap:
    """Resize the shorter side, and crop the middle, in one step: the usual evaluation transform.

    The pixels equal those of ``resize`` and ``center_crop`` within one level.

    Example: ``.map(stoker.images.resize_center_crop(resize=256, crop=224), on="image")``

    Args:
        resize: the new length of the shorter side.
        crop: the size of the result: one number, or height and width, at most ``resize``.
        antialias, dct_scaling, strict, max_pixels, orient: as in ``random_resized_crop``.

    Returns:
        A function for ``.map(fn, on="image")``.
    """
    height, width = _size(crop)
    if not is_whole_number(resize) or resize < max(height, width):
        raise ValueError(
            f"a crop of {height} x {width} does not fit into an image with a shorter side of "
            f"{resize!r}: give a larger resize="
        )
    place = partial(_resized_center_window, size=(height, width), resized=resize)
    reading = Reading(strict, max_pixels, bool(orient))
    fns = _resized_alike(place, reading, Resizing(bool(antialias), True, bool(dct_scaling)))
    return ImageMap(f"resize_center_crop(resize={resize}, crop={_size_text(crop)})", *fns)


# -- the work on images


def _cropped(place: Callable[..., ImageWindow], reading: Reading) -> Callable[..., Any]:
    return partial(_seen, open_image=reading.open, place=place, show=reading.crop)


def _resized(
    place: Callable[..., ImageWindow], reading: Reading, resizing: Resizing
) -> Callable[..., Any]:
    open_image = partial(reading.open, scaled=resizing.dct_scaling)
    show = partial(reading.resize, resizing=resizing)
    return partial(_seen, open_image=open_image, place=place, show=show)


def _resized_alike(
    place: Callable[..., ImageWindow], reading: Reading, resizing: Resizing
) -> tuple[Callable[..., Any], Many]:
    """Return functions of one image and of many, whose windows follow from their sizes."""
    many = partial(_many_resized, reading=reading, place=place, resizing=resizing)
    return _resized(place, reading, resizing), many


def _seen(
    image: Any,
    *,
    open_image: Callable[[Any], Opened],
    place: Callable[..., ImageWindow],
    show: Callable[[Opened, ImageWindow], Pixels],
    **rng: np.random.Generator,
) -> Any:
    """Return an image through a window, and its masks and boxes through the same window.

    Args:
        image: an image, or ``Together`` with masks and boxes.
        open_image: returns the image as ``Reading.open`` does.
        place: chooses the window, by height and width and a generator if it draws.
        show: returns the pixels in the window.
        rng: the generator, if any.
    """
    first, *others = image if isinstance(image, Together) else (image,)
    opened = open_image(first)
    size = size_of(opened)
    window = place(*size, **rng)
    pixels = show(opened, window)
    if not isinstance(image, Together):
        return pixels
    shown = (window.show(other, size, at) for at, other in enumerate(others, 1))
    return Together((pixels, *shown))


def _many_resized(
    images: Sequence[Any],
    address: Address | None,
    *,
    reading: Reading,
    place: Callable[..., ImageWindow],
    resizing: Resizing,
) -> list[Pixels | None]:
    """Return JPEGs and PNGs through a window of each; None for other images (``Many``)."""
    windows: dict[int, ImageWindow] = {}
    for at, image in enumerate(images):
        if reading.is_ready(image):
            try:
                windows[at] = place(*size_of(image))
            except (OSError, ValueError):
                continue  # the function of one image says why
    files = [images[at] for at in windows]
    made = reading.resize_many(files, list(windows.values()), resizing)
    return _spread(windows, made, len(images))


def _many_random(
    images: Sequence[Any],
    address: Address | None,
    *,
    reading: Reading,
    resizing: Resizing,
    how: dict[str, Any],
) -> list[Pixels | None]:
    """Return random resized crops of JPEGs and PNGs, as ``_many_resized`` does."""
    assert address is not None  # a random map has one
    key, counters = address
    ats = [at for at, image in enumerate(images) if reading.is_ready(image)]
    drawing = resizing.drawing(**how)
    if len(ats) == len(images):
        return reading.random_crops(images, drawing, address)
    files = [images[at] for at in ats]
    made = reading.random_crops(files, drawing, (key, counters[ats]))
    return _spread(ats, made, len(images))


def _spread(ats: Iterable[int], made: Sequence[Pixels | None], count: int) -> list[Pixels | None]:
    """Put results in their places among others that are None."""
    placed: list[Pixels | None] = [None] * count
    for at, pixels in zip(ats, made, strict=True):
        placed[at] = pixels
    return placed


def _random_resized_window(
    height: int,
    width: int,
    *,
    rng: np.random.Generator,
    size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    flip_p: float,
) -> ImageWindow:
    return ImageWindow(random_box(height, width, scale, ratio, rng), size, rng.random() < flip_p)


def _random_window(
    height: int, width: int, *, rng: np.random.Generator, size: tuple[int, int], padding: int
) -> ImageWindow:
    spare = [
        actual + 2 * padding - wanted for actual, wanted in zip((height, width), size, strict=True)
    ]
    if min(spare) < 0:
        raise ValueError(
            f"an image of {height} x {width} with a padding of {padding} is smaller than the crop "
            f"of {size[0]} x {size[1]}: give a larger padding=, or resize first"
        )
    top, left = (int(rng.random() * (each + 1)) - padding for each in spare)
    return ImageWindow(Box(top, left, *size), size)


def _whole_window(
    height: int, width: int, *, size: int | tuple[int, int], max_pixels: int
) -> ImageWindow:
    if isinstance(size, tuple):
        sides = size
    else:
        sides = _shorter_side(height, width, size)
        if sides[0] * sides[1] > max(max_pixels, height * width):
            raise ValueError(
                f"an image of {height} x {width} would become {sides[0]} x {sides[1]}, more than "
                f"max_pixels={max_pixels}"
            )
    return ImageWindow(Box(0, 0, height, width), sides)


def _center_window(height: int, width: int, *, size: tuple[int, int]) -> ImageWindow:
    top, left = _center_start(height, size[0]), _center_start(width, size[1])
    return ImageWindow(Box(top, left, *size), size)


def _resized_center_window(
    height: int, width: int, *, size: tuple[int, int], resized: int
) -> ImageWindow:
    rows, columns = _shorter_side(height, width, resized)
    down, across = height / rows, width / columns
    top, left = _center_start(rows, size[0]), _center_start(columns, size[1])
    return ImageWindow(Box(top * down, left * across, size[0] * down, size[1] * across), size)


def random_box(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Box:
    """Draw the box of a random resized crop, in whole pixels, for an image of this size."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_MAX_TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.random())
        aspect = math.exp(low + (high - low) * rng.random())
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            top = int(rng.random() * (height - down + 1))
            left = int(rng.random() * (width - across + 1))
            return Box(top, left, down, across)
    down, across = height, width
    if width < ratio[0] * height:
        down = max(1, round(width / ratio[0]))
    elif width > ratio[1] * height:
        across = max(1, round(height * ratio[1]))
    return Box((height - down) // 2, (width - across) // 2, down, across)


def _center_start(actual: int, wanted: int) -> int:
    """Return the start of a crop in the middle; it is negative if the image is smaller."""
    return round((actual - wanted) / 2) if actual >= wanted else -((wanted - actual) // 2)


def _shorter_side(height: int, width: int, to: int) -> tuple[int, int]:
    if height <= width:
        return to, int(to * width / height)
    return int(to * height / width), to


# -- arguments


def _size(size: Any) -> tuple[int, int]:
    check_is_no_image(size, "a size", ".map(stoker.images.resize(224), on='image')")
    sides = [size, size] if is_whole_number(size) else size
    if (
        not isinstance(sides, Sequence)
        or len(sides) != 2
        or not all(is_whole_number(side) and side > 0 for side in sides)
    ):
        raise ValueError(f"a size must be a number of pixels, or height and width, not {size!r}")
    return int(sides[0]), int(sides[1])


def _size_text(size: Size) -> str:
    return str(size) if is_whole_number(size) else "{} x {}".format(*_size(size))


def _check_range(name: str, value: Any) -> None:
    pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else (0, 0)
    if not all(map(is_number, pair)) or not 0 < pair[0] <= pair[1] < math.inf:
        raise ValueError(
            f"{name}= must be the smallest and the largest value, both above 0, not {value!r}"
        )


def _check_probability(name: str, value: Any) -> None:
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{name}= must be a probability from 0 to 1, not {value!r}")
