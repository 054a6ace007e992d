"""Decodes images (extra ``[images]``; JPEGs faster with the extra ``[fast]``)."""

from __future__ import annotations

import functools
import io
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import reads_only
from stoker.basics.pytree import is_tensor
from stoker.basics.signals import pass_on
from stoker.basics.thread_safety import thread_safe
from stoker.basics.validate import is_whole_number, names_in
from stoker.images import native
from stoker.images.image_map import without_gil

MAX_PIXELS = 89_478_485
"""The most pixels of an image by default: Pillow's own limit for a warning (a quarter of a GiB of
three channels)."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""The formats that are decoded by default, by Pillow's names. For others Pillow may start programs,
such as Ghostscript for an EPS, whatever the file is called."""

_MAX_SCANS = 10
"""How often the scans of a progressive JPEG may cover ``max_pixels``. Photographs have about ten
scans; a crafted file may ask for minutes of work."""

# The largest limit for the library in C: more pixels than any file has, and ten times that fits
# into an int64.
_LARGEST_LIMIT = 1 << 40

# NumPy takes a Pillow image as bytes: it is copied three times, through new memory if it is large.
# Strips stay in the processor's caches: 562 KB took 0.20 ms, not 0.67, and 9 MB 3.6 ms, not 14.
# Smaller images are faster as a whole (360 KB: 0.08 ms, and 0.12 in strips).
_STRIP_BYTES = 1 << 17
_LARGE_BYTES = 1 << 19

_WIDE_MODES = {"I": "32-bit integers", "F": "32-bit floating point"}
# Pillow reads their 16 bits as mode "I", too.
_OF_16_BITS = ("PNG", "PPM")

# The EXIF tag of the orientation.
_ORIENTATION = 0x0112

_DAMAGE = (SyntaxError, ValueError, RuntimeError)
"""Errors that Pillow raises for some kinds of damage, beside OSError."""


@thread_safe
@without_gil
@reads_only
def decode(
    data: bytes,
    *,
    orient: bool = False,
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = FORMATS,
) -> NDArray[np.uint8]:
    """Decode an encoded image: JPEG and PNG with ``stoker-native`` where it is, else with Pillow.

    Example: ``.map(stoker.images.decode, on="image")``

    Args:
        data: a whole image file: JPEG, PNG, WebP, GIF (its first frame), BMP, TIFF, or AVIF if
            Pillow can decode it.
        orient: whether to turn the image by its EXIF orientation. Damaged EXIF data is ignored.
        max_pixels: images with more pixels are refused before decoding. A progressive JPEG is
            refused as soon as its scans cover more than ten times as many.
        formats: Pillow's names of the allowed formats, such as ``["PPM", "JPEG2000"]``. Files of
            other formats are refused unread.

    Returns:
        RGB ``uint8 [height, width, 3]``, a writable array that the caller owns. Grey, palette, CMYK
        and transparent images are converted, and 16 bits are scaled to 8. Both libraries give the
        same pixels.

    Raises:
        ImportError: Pillow is missing.
        TypeError: the data is not ``bytes``.
        PIL.UnidentifiedImageError, OSError: the data is not an image of these formats, or is
            damaged or cut short.
        ValueError: the image is too large, or of 32 bits a channel; ``max_pixels`` is not a number
            of pixels, or Pillow has no such format.
    """
    data, limits = file_bytes(data), limits_of(max_pixels)
    pixels = _in_c(data, limits, formats)
    if pixels is None:
        pixels = pixels_of(decode_with_pillow(data, max_pixels, formats))
    return _orient(pixels, orientation_of(data, formats) if orient else 1)


@thread_safe
@reads_only
def read_size(
    data: bytes, *, orient: bool = False, formats: Sequence[str] = FORMATS
) -> tuple[int, int]:
    """Return height and width of an encoded image. It reads only the header.

    Args:
        data: as for ``decode``; the beginning of the file with the header is enough.
        orient: whether to return the size after a turn by the EXIF orientation.
        formats: as for ``decode``.

    Raises:
        ImportError, TypeError, PIL.UnidentifiedImageError, OSError: as ``decode``.
        ValueError: the image is not a JPEG, and larger than Pillow's limit.
    """
    data = file_bytes(data)
    library = native.library()
    if library is not None and is_jpeg(data) and _allows("JPEG", formats):
        height, width = library.jpeg_size(data)
    else:
        with _open(data, formats) as image:
            width, height = image.size
    if orient and orientation_of(data, formats) >= 5:
        return width, height
    return height, width


def is_file(image: Any) -> bool:
    """True if an image is an encoded file's bytes, and not pixels."""
    if isinstance(image, np.ndarray):
        return image.ndim == 1 and image.dtype == np.uint8
    return isinstance(image, (bytes, bytearray, memoryview))


def file_bytes(data: Any) -> bytes:
    """Return a file's bytes as ``bytes``. Raises TypeError for another value."""
    if is_file(data):
        return bytes(data)
    if isinstance(data, (str, os.PathLike)):
        raise TypeError(
            f"an image file must be given as its bytes, not as its name {str(data)!r}: read it "
            "with Path(name).read_bytes(), or read a whole folder with stoker.from_folder()"
        )
    what = f"array of {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
    advice = "give on= the name of the field with the image"
    if is_tensor(data):
        advice = "convert it with a .map(numpy.array, on=...) before"
    if type(data) is list:
        advice = "decode files one by one, before .batch()"
    raise TypeError(f"an image file must be bytes, not {what}: {advice}")


def check_is_no_image(value: Any, what: str, example: str) -> None:
    """Raise TypeError if a function that returns a map is used as the map itself."""
    if is_file(value) or getattr(value, "ndim", 0) > 1:
        raise TypeError(
            f"this function got an image instead of {what}: call it with {what} first, and use its "
            f"result as the map, as in {example}"
        )


def is_jpeg(data: bytes) -> bool:
    """True if data begins like a JPEG."""
    return data.startswith(b"\xff\xd8\xff")


def is_png(data: bytes) -> bool:
    """True if data begins like a PNG."""
    return data.startswith(b"\x89PNG")


def png_limit(max_pixels: int) -> int:
    """Return how many pixels of a PNG the library may decode; Pillow judges larger ones."""
    return min(max_pixels, pillow().MAX_IMAGE_PIXELS or max_pixels)


def limits_of(max_pixels: int) -> dict[str, int]:
    """Return the library's limits: pixels, and pixels times scans.

    Raises ValueError unless ``max_pixels`` is a number of pixels.
    """
    if not is_whole_number(max_pixels) or max_pixels < 1:
        raise ValueError(f"max_pixels= must be a number of pixels, not {max_pixels!r}")
    limit = min(int(max_pixels), _LARGEST_LIMIT)
    return {"max_pixels": limit, "max_scan_pixels": _MAX_SCANS * limit}


def decode_with_pillow(data: bytes, max_pixels: int, formats: Sequence[str] = FORMATS) -> Any:
    """Decode an image to a Pillow image of mode RGB. Raises as ``decode`` does."""
    with _open(data, formats) as image:
        _check_size(data, image, max_pixels)
        if image.mode == "F" or (image.mode == "I" and image.format not in _OF_16_BITS):
            raise ValueError(
                f"the {image.format} has pixels of mode {image.mode} ({_WIDE_MODES[image.mode]}), "
                "and no range of these is known to be black to white: read it as it is, such as by "
                ".map(lambda data: numpy.array(PIL.Image.open(io.BytesIO(data))), on=...)"
            )
        try:
            return _as_rgb(image)
        except _DAMAGE as error:
            pass_on(error)
            raise OSError(f"the {image.format} is damaged: {error}") from error


def pixels_of(image: Any) -> NDArray[np.uint8]:
    """Return the pixels of a Pillow image with 8 bits a channel, as an array of the caller's own.

    ``[height, width, channels]``, or ``[height, width]`` with one channel.
    """
    width, height = image.size
    channels = len(image.getbands())
    row_bytes = width * channels
    if height * row_bytes <= _LARGE_BYTES:
        return np.array(image)
    out = np.empty((height, width, channels), np.uint8)
    rows = max(1, _STRIP_BYTES // row_bytes)
    for top in range(0, height, rows):
        strip = out[top : top + rows]
        part = image.crop((0, top, width, top + len(strip)))
        strip[...] = np.frombuffer(part.tobytes(), np.uint8).reshape(strip.shape)
    return out if channels > 1 else out[..., 0]


def _in_c(data: bytes, limits: dict[str, int], formats: Sequence[str]) -> NDArray[np.uint8] | None:
    """Decode a file with ``stoker-native``; None if Pillow has to do it. Raises as ``decode``."""
    library, max_pixels = native.library(), limits["max_pixels"]
    if library is None:
        return None
    if not is_jpeg(data):
        if not _allows("PNG", formats):
            return None
        png: NDArray[np.uint8] | None = library.png_decode(data, max_pixels=png_limit(max_pixels))
        return png
    if not _allows("JPEG", formats):
        return None
    height, width = library.jpeg_size(data)
    _check_pixels(height, width, max_pixels)  # before memory is allocated
    jpeg: NDArray[np.uint8] = library.jpeg_decode(data, (0, 0, width, height), **limits)
    return jpeg


def _as_rgb(image: Any) -> Any:
    if image.mode.startswith("I"):
        # Pillow does not scale the 12 bits of a TIFF; 258 is the tag of BitsPerSample.
        bits = image.tag_v2.get(258) if image.format == "TIFF" else None
        return pillow().fromarray(_from_deep(np.asarray(image), 4095 if bits == (12,) else 65535))
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # Pillow warns if it is converted to RGB directly
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()  # now: the file is closed afterwards
    return image


def _open(data: bytes, formats: Sequence[str] = FORMATS) -> Any:
    Image = pillow()
    readable_formats = _check_formats(formats)
    try:
        return Image.open(io.BytesIO(data), formats=readable_formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(
            f"the image has more pixels than Pillow allows (PIL.Image.MAX_IMAGE_PIXELS): {error}"
        ) from error
    except Image.UnidentifiedImageError as error:
        raise Image.UnidentifiedImageError(_describe_unknown(data, formats)) from error
    except _DAMAGE as error:
        pass_on(error)
        raise OSError(f"the image is damaged: {error}") from error


def _allows(name: str, formats: Sequence[str]) -> bool:
    return formats is FORMATS or name in _check_formats(formats)


def _check_formats(formats: Sequence[str]) -> list[str]:
    return _find_formats(formats if isinstance(formats, str) else tuple(formats))


@functools.cache
def _find_formats(formats: str | tuple[str, ...]) -> list[str]:
    """Return the formats that the installed Pillow can read.

    Raises ValueError for a name that Pillow does not know, unless it is one of ``FORMATS``: an
    older Pillow may lack some of these.
    """
    Image = pillow()
    Image.init()
    names = [name.upper() for name in names_in("formats", formats, "['JPEG', 'PPM']")]
    for name in names:
        if name not in Image.OPEN and name not in FORMATS:
            raise ValueError(
                f"formats= must be Pillow's names of formats, such as 'PNG' or 'PPM', not "
                f"{name!r}. The installed Pillow reads {', '.join(sorted(Image.OPEN))}"
            )
    return [name for name in names if name in Image.OPEN]


def _describe_unknown(data: bytes, formats: Sequence[str]) -> str:
    if not data:
        return "cannot identify an image in an empty file"
    text = f"cannot identify an image in {len(data)} bytes that begin with {data[:12]!r}"
    name = _find_other_format(data, formats)
    if name is not None:
        text += (
            f": this looks like {name}, which is not decoded by default. If you trust these files, "
            f"use functools.partial(stoker.images.decode, formats=[{name!r}])"
        )
    return text


def _find_other_format(data: bytes, formats: Sequence[str]) -> str | None:
    """Return the name of a format outside ``formats`` that a file's first bytes match, or None."""
    for name, (_, accept) in pillow().OPEN.items():
        if accept is not None and name not in _check_formats(formats):
            try:
                accepts = accept(data[:16])
            except (LookupError, ValueError, struct.error):
                continue  # the data is too short for this check
            if accepts is True or (accepts and not isinstance(accepts, str)):
                return str(name)
    return None


def _check_pixels(height: int, width: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ValueError(f"{width} x {height} pixels: more than {max_pixels}")


def _check_size(data: bytes, image: Any, max_pixels: int) -> None:
    width, height = image.size
    _check_pixels(height, width, max_pixels)
    # Each scan begins with this marker, which otherwise occurs in previews only.
    scans = data.count(b"\xff\xda") if is_jpeg(data) else 1
    if scans > 1 and width * height * scans > _MAX_SCANS * max_pixels:
        raise ValueError(
            f"{width} x {height} pixels in {scans} scans: more than {_MAX_SCANS * max_pixels} "
            "times pixel"
        )


def _from_deep(grey: NDArray[Any], white: int) -> NDArray[np.uint8]:
    """Scale one channel up to ``white`` to three of 8 bits. (Pillow would clip it.)"""
    eight = np.clip(grey / (white / 255), 0, 255).round().astype(np.uint8)
    return np.repeat(eight[..., None], 3, axis=-1)


def orientation_of(data: bytes, formats: Sequence[str] = FORMATS) -> int:
    """Return an image's EXIF orientation; 1 (no turn) for TIFFs, which Pillow turns itself."""
    if is_jpeg(data) and b"Exif\0" not in data and b":Orientation" not in data:
        return 1  # without Pillow, which takes as long as a small crop
    with _open(data, formats) as image:
        if image.format == "TIFF":
            return 1
        try:
            turn = image.getexif().get(_ORIENTATION, 1)
        except SyntaxError:  # Pillow's error for damaged EXIF data
            return 1
    return turn if isinstance(turn, int) else 1


def _orient(pixels: NDArray[np.uint8], turn: int) -> NDArray[np.uint8]:
    """Return pixels turned by an EXIF orientation."""
    if not 2 <= turn <= 8:
        return pixels
    if turn >= 5:  # rows and columns change places
        pixels = pixels.swapaxes(0, 1)
    down = -1 if turn in (3, 4, 7, 8) else 1
    across = -1 if turn in (2, 3, 6, 7) else 1
    return pixels[::down, ::across].copy()


def pillow() -> Any:
    """Return ``PIL.Image``. Raises ImportError that says how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("decoding images needs Pillow: pip install pillow") from error
    return Image
