"""Resized crops of one image, with the library in C or with Pillow: equal within one level.

An image is an encoded file's ``bytes``, or pixels: ``uint8 [height, width, channels]`` with 1, 3 or
4 channels. With the library in C, a crop decodes only the part of a JPEG that it needs. All other
files are decoded in full first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.pytree import Together, is_tensor
from stoker.images import native
from stoker.images.decoding import (
    MAX_PIXELS,
    decode,
    decode_with_pillow,
    file_bytes,
    is_file,
    is_jpeg,
    is_png,
    limits_of,
    orientation_of,
    pillow,
    pixels_of,
    png_limit,
)
from stoker.images.geometry import Box, ImageWindow
from stoker.images.image_map import Address

Pixels = NDArray[np.uint8]
Opened = Any
"""An opened image: the bytes of a JPEG, of which the library decodes the needed part; a Pillow
image of mode RGB, without the library; or pixels."""

# Pillow's modes by the number of channels. Not RGBA: Pillow would weigh its colours by alpha.
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


@dataclass(frozen=True)
class Resizing:
    """How images are resized.

    Attributes:
        antialias: whether shrinking uses all pixels, or only the nearest two.
        beyond: whether pixels outside the box contribute to its edge.
        dct_scaling: whether the JPEG codec may shrink it first.
    """

    antialias: bool
    beyond: bool
    dct_scaling: bool

    def crop(self, window: ImageWindow) -> Any:
        """Return a window as the library takes it."""
        (top, left, height, width), size, flip = window
        flags = bool(flip), self.antialias, self.beyond, self.dct_scaling
        return _library().Crop(left, top, width, height, *size, *flags)

    def drawing(
        self,
        size: tuple[int, int],
        scale: tuple[float, float],
        ratio: tuple[float, float],
        flip_p: float,
    ) -> Any:
        """Return a random resized crop as the library takes it."""
        like = self.crop(ImageWindow(Box(0, 0, 0, 0), size))
        return _library().Drawing(like, *scale, *ratio, *map(math.log, ratio), flip_p)


@dataclass(frozen=True)
class Reading:
    """Settings for reading images.

    Attributes:
        strict: whether files are decoded in full, so that damage anywhere in one is an error.
        max_pixels: images with more pixels are refused, as in ``decode``.
        orient: whether to turn files by their EXIF orientation; those are decoded in full.
    """

    strict: bool = False
    max_pixels: int = MAX_PIXELS
    orient: bool = False

    def __post_init__(self) -> None:
        _ = self._limits  # raises for an invalid value where the pipeline is written

    @cached_property
    def _limits(self) -> dict[str, int]:
        return limits_of(self.max_pixels)

    def open(self, image: Any, *, scaled: bool = False) -> Opened:
        """Open an image; ``scaled`` says that the codec may shrink it.

        Raises TypeError or ValueError if it is not an image, and the errors of ``decode``.
        """
        if type(image) is bytes:
            data = image
        elif is_file(image):
            data = bytes(image)
        else:
            return _check_image(image)
        if self._turns(data):
            return decode(data, orient=True, max_pixels=self.max_pixels)
        if native.library() is None:
            return decode_with_pillow(data, self.max_pixels)
        if not is_jpeg(data):
            return decode(data, max_pixels=self.max_pixels)
        if not self.strict:
            return data
        pixels = decode(data, max_pixels=self.max_pixels)
        return data if scaled else pixels  # the pixels are there already, unless the codec shrinks

    def pixels(self, image: Any) -> Pixels:
        """Return all pixels of an image. Raises as ``open`` does."""
        return decode(image, max_pixels=self.max_pixels) if is_file(image) else _check_image(image)

    def crop(self, image: Opened, window: ImageWindow) -> Pixels:
        """Return a part of an opened image as a new array; pixels outside the image are black.

        The window has whole pixels, and the size of its box.
        """
        (height, width), top, left = window.size, int(window.box.top), int(window.box.left)
        rows, columns = size_of(image)
        first, last = max(top, 0), min(top + height, rows)
        begin, end = max(left, 0), min(left + width, columns)
        if first >= last or begin >= end:
            channels = image.shape[2] if isinstance(image, np.ndarray) else 3
            return np.zeros((height, width, channels), np.uint8)
        if isinstance(image, bytes):
            box = (begin, first, end - begin, last - first)
            part: Pixels = _library().jpeg_decode(image, box, **self._limits)
        elif isinstance(image, np.ndarray):
            part = image[first:last, begin:end]
        else:
            part = pixels_of(image.crop((begin, first, end, last)))
        if part.shape[:2] == (height, width):
            return part.copy() if isinstance(image, np.ndarray) else part
        out = np.zeros((height, width, part.shape[2]), np.uint8)
        out[first - top : last - top, begin - left : end - left] = part
        return out

    def resize(self, image: Opened, window: ImageWindow, resizing: Resizing) -> Pixels:
        """Return a window of an opened image, resized bilinearly, as a new array.

        Its box lies within the image, and has whole pixels, unless it is ``resizing.beyond``.
        """
        library = native.library()
        if library is None:
            return _with_pillow(image, window, resizing)
        crop = resizing.crop(window)
        if isinstance(image, bytes):
            cropped: Pixels = library.jpeg_crop(image, crop, **self._limits)
        else:
            cropped = library.pixels_crop(image, crop)
        return cropped

    def is_ready(self, image: Any) -> bool:
        """True if an image is a file that the library crops, and that needs no check before."""
        if type(image) is not bytes:
            return False
        if is_jpeg(image):
            return not self.strict and not self._turns(image)
        return is_png(image) and not self._turns(image)  # all of it is decoded

    def _turns(self, data: bytes) -> bool:
        return self.orient and orientation_of(data) != 1

    def resize_many(
        self, files: Sequence[bytes], windows: Sequence[ImageWindow], resizing: Resizing
    ) -> list[Pixels | None]:
        """Return windows of files that are ready, None for those that are to be opened.

        The GIL is taken once for all: with many threads, taking it takes longer than the work.
        """
        crops = [resizing.crop(window) for window in windows]
        made: list[Pixels | None] = _library().crop_many(files, crops, **self._limits_of(files))
        return made

    def random_crops(
        self, files: Sequence[bytes], drawing: Any, address: Address
    ) -> list[Pixels | None]:
        """Return random windows as ``resize_many`` does, drawn in the same call."""
        limits = self._limits_of(files)
        made: list[Pixels | None] = _library().random_crops(files, drawing, *address, **limits)
        return made

    def _limits_of(self, files: Sequence[bytes]) -> dict[str, int]:
        if not any(map(is_png, files)):
            return self._limits  # without Pillow
        return self._limits | {"max_pixels": png_limit(self._limits["max_pixels"])}


def size_of(image: Opened) -> tuple[int, int]:
    """Return height and width of an opened image."""
    if isinstance(image, bytes):
        library = _library()
        height, width = library.png_size(image) if is_png(image) else library.jpeg_size(image)
        return height, width
    if isinstance(image, np.ndarray):
        return image.shape[0], image.shape[1]
    return image.height, image.width


def _check_image(image: Any) -> Pixels:
    """Return an array of pixels that can be cropped and resized. Raises TypeError, ValueError."""
    if isinstance(image, (str, os.PathLike)):
        file_bytes(image)  # raises an error that says what to do
    if not isinstance(image, np.ndarray):
        what = type(image)
        advice = "give on= the name of the field with the image"
        if isinstance(image, Together):
            advice = "it changes colours alone: give on= the name of the image, not a list"
        if what.__module__.startswith("PIL.") or is_tensor(image):
            advice = "convert it with a .map(numpy.array, on=...) before"
        raise TypeError(f"an image must be bytes or an array, not {what.__name__}: {advice}")
    if image.dtype != np.uint8:
        raise TypeError(
            f"crops and resize need uint8 images, not {image.dtype}: put them before the stage "
            f"that converts images to {image.dtype}"
        )
    if image.ndim != 3 or image.shape[2] not in _MODES or not image.size:
        grey = ": for a grey image give image[..., None]" if image.ndim == 2 else ""
        raise ValueError(
            "an image must be [height, width, channels] with 1, 3 or 4 channels, not "
            f"{list(image.shape)}{grey}"
        )
    return image


def _library() -> Any:
    library = native.library()
    assert library is not None  # an image stays encoded only if there is the library
    return library


def _with_pillow(image: Opened, window: ImageWindow, resizing: Resizing) -> Pixels:
    Image, box, size = pillow(), window.box, window.size
    if isinstance(image, np.ndarray):
        height, width, channels = image.shape
        image = Image.frombytes(_MODES[channels], (width, height), image.tobytes())
    top, left = box.top, box.left
    if not resizing.beyond:
        bottom, right = round(top + box.height), round(left + box.width)
        image = image.crop((round(left), round(top), right, bottom))
        top = left = 0
    extent = (left, top, min(left + box.width, image.width), min(top + box.height, image.height))
    bilinear, across = Image.Resampling.BILINEAR, (size[1], size[0])
    if resizing.antialias:
        image = image.resize(across, bilinear, box=extent)
    else:
        image = image.transform(across, Image.Transform.EXTENT, extent, bilinear)
    if window.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return pixels_of(image).reshape(*size, -1)
