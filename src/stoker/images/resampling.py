"""Resized crops of one image, by the library in C or by Pillow: the same pixels within one level.

An image is an encoded file's ``bytes``, or pixels, ``uint8 [height, width, channels]`` of 1, 3 or 4
channels. With the library in C, only the part of a JPEG that a crop needs is decoded. Everything
else is decoded in full first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.pytree import is_tensor
from stoker.images import native
from stoker.images.decoding import (
    MAX_PIXELS,
    by_pillow,
    decode,
    file_bytes,
    is_file,
    is_jpeg,
    limits_of,
    pillow,
)
from stoker.images.sound_files import SoundFiles

Pixels = NDArray[np.uint8]
Opened = Any
"""An opened image: a JPEG, of which the library decodes the needed part; Pillow's RGB image,
without the library; or pixels."""

# Pillow's, by the number of channels; not RGBA, of whose alpha Pillow would take notice.
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


@dataclass(frozen=True)
class Box:
    """A part of an image, in pixels from its upper left corner."""

    top: float
    left: float
    height: float
    width: float


@dataclass(frozen=True)
class Reading:
    """Settings for reading images.

    Attributes:
        strict: whether a file is decoded in full at its first use, so that damage anywhere in it is
            an error.
        max_pixels: larger images are refused, as in ``decode``.
        sound: files that were decoded in full.
    """

    strict: bool = False
    max_pixels: int = MAX_PIXELS
    sound: SoundFiles = field(default_factory=SoundFiles, compare=False, repr=False)

    def __post_init__(self) -> None:
        limits_of(self.max_pixels)  # refuses what is none, where the pipeline is written

    def opened(self, image: Any, *, scaled: bool = False) -> Opened:
        """Open an image; with ``scaled`` the codec shrinks it.

        Raises TypeError or ValueError if it is not an image, and the errors of ``decode``.
        """
        if not is_file(image):
            return _checked(image)
        data = bytes(image)
        if native.library() is None:
            return by_pillow(data, self.max_pixels)
        if not is_jpeg(data):
            return decode(data, max_pixels=self.max_pixels)
        if not self.strict or data in self.sound:
            return data
        pixels = decode(data, max_pixels=self.max_pixels)
        self.sound.add(data)
        return data if scaled else pixels  # crops of these are the same, but for that

    def pixels(self, image: Any) -> Pixels:
        """Return all pixels of an image; raises as ``opened``."""
        return decode(image, max_pixels=self.max_pixels) if is_file(image) else _checked(image)

    def cut(self, image: Opened, top: int, left: int, height: int, width: int) -> Pixels:
        """Return a part of an opened image as a new array; pixels outside the image are 0."""
        rows, columns = size_of(image)
        first, last = max(top, 0), min(top + height, rows)
        begin, end = max(left, 0), min(left + width, columns)
        if first >= last or begin >= end:
            channels = image.shape[2] if isinstance(image, np.ndarray) else 3
            return np.zeros((height, width, channels), np.uint8)
        if isinstance(image, bytes):
            box = (begin, first, end - begin, last - first)
            found: Pixels = _library().jpeg_decode(image, box, **limits_of(self.max_pixels))
        elif isinstance(image, np.ndarray):
            found = image[first:last, begin:end]
        else:
            found = np.array(image.crop((begin, first, end, last)))
        if found.shape[:2] == (height, width):
            return found.copy() if isinstance(image, np.ndarray) else found
        out = np.zeros((height, width, found.shape[2]), np.uint8)
        out[first - top : last - top, begin - left : end - left] = found
        return out

    def resized(
        self,
        image: Opened,
        box: Box,
        size: tuple[int, int],
        *,
        flip: bool = False,
        antialias: bool = True,
        beyond: bool = False,
        dct_scaling: bool = False,
    ) -> Pixels:
        """Return a box of an opened image in another size, bilinearly, a new array.

        Args:
            image: what ``opened`` returned.
            box: within the image; of whole pixels, unless pixels beyond it count.
            size: height and width of the result.
            flip: whether to flip left and right.
            antialias: whether shrinking uses all pixels, or only the nearest two.
            beyond: whether pixels outside the box contribute to its edge.
            dct_scaling: whether the JPEG codec may shrink it first.
        """
        library = native.library()
        if library is None:
            return _with_pillow(image, box, size, flip, antialias, beyond)
        crop = library.Crop(
            box.left,
            box.top,
            box.width,
            box.height,
            *size,
            *map(bool, (flip, antialias, beyond, dct_scaling)),
        )
        if isinstance(image, bytes):
            return np.asarray(library.jpeg_crop(image, crop, **limits_of(self.max_pixels)))
        return np.asarray(library.pixels_crop(image, crop))


def size_of(image: Opened) -> tuple[int, int]:
    """Return height and width of an opened image."""
    if isinstance(image, bytes):
        height, width = _library().jpeg_size(image)
        return height, width
    if isinstance(image, np.ndarray):
        return image.shape[0], image.shape[1]
    return image.height, image.width


def _checked(image: Any) -> Pixels:
    """Return pixels that can be cropped and resized. Raises TypeError, ValueError."""
    if isinstance(image, (str, os.PathLike)):
        file_bytes(image)  # says what to do
    if not isinstance(image, np.ndarray):
        what = type(image)
        instead = "on= says which field of an example it is"
        if what.__module__.startswith("PIL.") or is_tensor(image):
            instead = "a .map(numpy.array, on=...) before this makes an array of it"
        raise TypeError(f"an image is bytes or an array, not {what.__name__}: {instead}")
    if image.dtype != np.uint8:
        raise TypeError(f"images are cropped and resized as uint8, before they are {image.dtype}")
    if image.ndim != 3 or image.shape[2] not in _MODES or not image.size:
        grey = ": a grey one is image[..., None]" if image.ndim == 2 else ""
        raise ValueError(
            "an image is [height, width, channels] of 1, 3 or 4 channels, not "
            f"{list(image.shape)}{grey}"
        )
    return image


def _library() -> Any:
    library = native.library()
    assert library is not None  # who opened the image left it encoded
    return library


def _with_pillow(
    image: Opened, box: Box, size: tuple[int, int], flip: bool, antialias: bool, beyond: bool
) -> Pixels:
    Image = pillow()
    if isinstance(image, np.ndarray):
        height, width, channels = image.shape
        image = Image.frombytes(_MODES[channels], (width, height), image.tobytes())
    top, left = box.top, box.left
    if not beyond:
        bottom, right = round(top + box.height), round(left + box.width)
        image = image.crop((round(left), round(top), right, bottom))
        top = left = 0
    extent = (left, top, min(left + box.width, image.width), min(top + box.height, image.height))
    bilinear, across = Image.Resampling.BILINEAR, (size[1], size[0])
    if antialias:
        image = image.resize(across, bilinear, box=extent)
    else:
        image = image.transform(across, Image.Transform.EXTENT, extent, bilinear)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(image).reshape(*size, -1)
