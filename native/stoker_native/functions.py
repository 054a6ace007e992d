"""The library, as declared in ``csrc/stoker_native.h``, and its functions for images and files."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

_LIBRARY = "STOKER_NATIVE_LIBRARY"
"""Names another build of the library, such as one with sanitizers."""

_MESSAGE_BYTES = 256
# For some files at a time: photographs have a tenth of a MiB to 4 MiB. Chosen, not measured.
_FILES_BYTES = 4 << 20
_DAMAGED, _TOO_LARGE, _NO_MEMORY = 1, 2, 3


class TooLarge(ValueError):
    """An image has more pixels, or more pixels times scans, than the limits allow."""


class Limits(ctypes.Structure):
    """``struct limits``."""

    _fields_ = [("pixels", c_int64), ("scan_pixels", c_int64)]


class Crop(ctypes.Structure):
    """``struct crop``: a box of an image, and how to resize it.

    Args:
        x, y, width, height: the box, in pixels; its edges may lie within pixels.
        out_height, out_width: the size of the result.
        flip: whether to flip left to right.
        antialias: whether shrinking uses all pixels of the box, or only the nearest two.
        beyond: whether pixels outside the box contribute to its edge.
        dct: whether the codec may shrink the image first, by 2, 4 or 8.
    """

    _fields_ = [
        ("x", c_double),
        ("y", c_double),
        ("width", c_double),
        ("height", c_double),
        ("out_height", c_int32),
        ("out_width", c_int32),
        ("flip", c_int32),
        ("antialias", c_int32),
        ("beyond", c_int32),
        ("dct", c_int32),
    ]
    out_height: int
    out_width: int


class Drawing(ctypes.Structure):
    """``struct drawing``: how the boxes of random resized crops are drawn.

    Args:
        like: a crop like those that are made: its box and its flip do not count.
        scale_low, scale_high: the area of a box, as a fraction of the image's area.
        ratio_low, ratio_high: its width over its height.
        log_low, log_high: their logarithms by ``math.log``.
        flip_p: the probability of a flip.
    """

    _fields_ = [
        ("like", Crop),
        ("scale_low", c_double),
        ("scale_high", c_double),
        ("ratio_low", c_double),
        ("ratio_high", c_double),
        ("log_low", c_double),
        ("log_high", c_double),
        ("flip_p", c_double),
    ]
    like: Crop


def _load() -> ctypes.CDLL:
    beside = Path(__file__).with_name("libstoker_native.so")
    try:
        library = ctypes.CDLL(os.environ.get(_LIBRARY) or str(beside))
    except OSError as error:
        raise ImportError(f"the library of stoker-native cannot be loaded: {error}") from error
    data: list[Any] = [c_char_p, c_size_t]
    crop, limits, out = POINTER(Crop), POINTER(Limits), c_void_p
    library.stoker_jpeg_size.argtypes = [*data, c_int32 * 3, c_char_p]
    library.stoker_jpeg_decode.argtypes = [*data, c_int32 * 4, limits, out, c_char_p]
    library.stoker_jpeg_crop.argtypes = [*data, crop, limits, out, c_char_p]
    files: list[Any] = [c_int64, POINTER(c_char_p), POINTER(c_size_t)]
    results: list[Any] = [limits, POINTER(c_void_p), POINTER(c_int32)]
    library.stoker_crop_many.argtypes = [*files, crop, *results]
    library.stoker_random_crops.argtypes = [
        *files, POINTER(Drawing), c_void_p, c_void_p, *results,
    ]  # fmt: skip
    library.stoker_crop_many.restype = library.stoker_random_crops.restype = None
    library.stoker_pixels_crop.argtypes = [
        c_void_p, c_int32, c_int32, c_int32, c_int64, crop, out, c_char_p,
    ]  # fmt: skip
    library.stoker_png_decode.argtypes = [*data, limits, out, c_char_p]
    library.stoker_use_path.argtypes = [c_char_p]
    library.stoker_read_windows.argtypes = [
        c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int64, c_void_p, c_void_p,
    ]  # fmt: skip
    library.stoker_read_windows.restype = c_int64
    library.stoker_look_up_pixels.argtypes = [
        c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32, c_int32, c_int32, c_void_p,
    ]  # fmt: skip
    for name in (
        "jpeg_size",
        "jpeg_decode",
        "jpeg_crop",
        "pixels_crop",
        "png_decode",
        "look_up_pixels",
        "gather_rows",
        "use_path",
    ):
        getattr(library, f"stoker_{name}").restype = c_int
    library.stoker_read_files.argtypes = [
        POINTER(c_char_p), c_int64, c_void_p, c_int64, POINTER(c_int64),
    ]  # fmt: skip
    library.stoker_read_files.restype = c_int64
    library.stoker_copy_rows.argtypes = [POINTER(c_void_p), c_int64, c_int64, c_int64, c_void_p]
    library.stoker_copy_rows.restype = None
    library.stoker_gather_rows.argtypes = [
        c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p,
    ]  # fmt: skip
    library.stoker_paths.restype = library.stoker_last_path.restype = c_char_p
    return library


library = _load()
# Calls that keep the GIL: to let it go and get it again takes longer than to read a header, and
# with many threads keeps the training loop waiting.
_holding = ctypes.PyDLL(library._name)
_jpeg_size, _png_size = _holding.stoker_jpeg_size, _holding.stoker_png_size
_jpeg_size.argtypes = _png_size.argtypes = library.stoker_jpeg_size.argtypes


class _Scratch(threading.local):
    """Memory that a thread's calls share: making it takes as long as reading a JPEG's header."""

    def __init__(self) -> None:
        self.message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self.size = (c_int32 * 3)()
        self.files = np.empty(_FILES_BYTES, np.uint8)  # takes memory where it is written to


_scratch = _Scratch()


def _address(out: Any) -> int | None:
    """Return the address of a new array for a call; ``out.ctypes`` takes four times as long."""
    return ctypes.addressof(ctypes.c_char.from_buffer(out)) if out.size else None


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Return height and width of a JPEG. It reads only the header.

    Raises OSError if the data is not a JPEG, or if its header is damaged or incomplete.
    """
    found, message = _scratch.size, _scratch.message
    outcome = _jpeg_size(data, len(data), found, message)
    if outcome:
        _fail(outcome, message)
    return found[0], found[1]


def jpeg_decode(
    data: bytes,
    box: tuple[int, int, int, int],
    *,
    max_pixels: int,
    max_scan_pixels: int,
) -> NDArray[np.uint8]:
    """Decode a box ``(x, y, width, height)`` of a JPEG to RGB ``uint8 [height, width, 3]``.

    It does not read rows below the box. Of columns beside the box and rows above it, it decodes
    only what it needs to find the box.

    Raises OSError as ``jpeg_size``, and if the data that it reads is damaged; TooLarge if the image
    exceeds the limits; ValueError if the box is not within the image.
    """
    out = np.empty((max(box[3], 0), max(box[2], 0), 3), np.uint8)
    message = _scratch.message
    limits = Limits(max_pixels, max_scan_pixels)
    outcome = library.stoker_jpeg_decode(
        data, len(data), (c_int32 * 4)(*box), byref(limits), _address(out), message
    )
    if outcome:
        _fail(outcome, message)
    return out


def jpeg_crop(
    data: bytes, crop: Crop, *, max_pixels: int, max_scan_pixels: int
) -> NDArray[np.uint8]:
    """Crop and resize a JPEG: RGB ``uint8 [out_height, out_width, 3]``.

    Raises as ``jpeg_decode``.
    """
    out, message = np.empty(_shape(crop), np.uint8), _scratch.message
    limits = Limits(max_pixels, max_scan_pixels)
    outcome = library.stoker_jpeg_crop(
        data, len(data), byref(crop), byref(limits), _address(out), message
    )
    if outcome:
        _fail(outcome, message)
    return out


def crop_many(
    files: Sequence[bytes], crops: Sequence[Crop], *, max_pixels: int, max_scan_pixels: int
) -> list[NDArray[np.uint8] | None]:
    """Crop and resize JPEGs as ``jpeg_crop`` does, and PNGs, in a single call without the GIL.

    Returns None in place of one that ``jpeg_crop`` raises an error for, or ``png_decode`` does not
    decode.
    """
    count, limits = len(files), Limits(max_pixels, max_scan_pixels)
    made, addresses, outcomes = _results([_shape(crop) for crop in crops])
    library.stoker_crop_many(
        *_addressed(files), (Crop * count)(*crops), byref(limits), addresses, outcomes
    )
    return [None if outcome else out for out, outcome in zip(made, outcomes, strict=True)]


def random_crops(
    files: Sequence[bytes],
    drawing: Drawing,
    key: NDArray[np.uint64],
    counters: NDArray[np.uint64],
    *,
    max_pixels: int,
    max_scan_pixels: int,
) -> list[NDArray[np.uint8] | None]:
    """Draw boxes of JPEGs and PNGs, and crop and resize them as ``crop_many`` does.

    Args:
        drawing: how boxes are drawn, which all crops have in common.
        key: of NumPy's Philox, ``uint64 [2]``.
        counters: words 1 and 2 of its counter for each file, ``uint64 [files, 2]``; words 0 and 3
            are 0.
    """
    count, limits = len(files), Limits(max_pixels, max_scan_pixels)
    if key.dtype != np.uint64 or counters.dtype != np.uint64:
        raise TypeError("keys and counters are uint64")
    if key.shape != (2,) or counters.shape != (count, 2):
        raise ValueError("a key has two words, and there are two of a counter for each file")
    words = [np.ascontiguousarray(each) for each in (key, counters)]
    made, addresses, outcomes = _results([_shape(drawing.like)] * count)
    library.stoker_random_crops(
        *_addressed(files), byref(drawing), *[each.ctypes.data for each in words], byref(limits),
        addresses, outcomes,
    )  # fmt: skip
    return [None if outcome else out for out, outcome in zip(made, outcomes, strict=True)]


def _addressed(files: Sequence[bytes]) -> tuple[int, Any, Any]:
    """Return the number of files, their addresses and their sizes."""
    count = len(files)
    return count, (c_char_p * count)(*files), (c_size_t * count)(*map(len, files))


def _shape(crop: Crop) -> tuple[int, int, int]:
    return max(crop.out_height, 0), max(crop.out_width, 0), 3


def _results(shapes: Sequence[tuple[int, ...]]) -> tuple[list[NDArray[np.uint8]], Any, Any]:
    """Return new arrays of these shapes, their addresses, and outcomes."""
    made, count = [np.empty(shape, np.uint8) for shape in shapes], len(shapes)
    return made, (c_void_p * count)(*map(_address, made)), (c_int32 * count)()


def pixels_crop(pixels: NDArray[np.uint8], crop: Crop) -> NDArray[np.uint8]:
    """Crop and resize pixels ``uint8 [height, width, channels]`` with 1 to 4 channels.

    Rows may have any distance in memory; rows whose pixels are not contiguous are copied first.
    Raises TypeError or ValueError for other arguments, or if the box is not within the image.
    """
    if pixels.dtype != np.uint8:
        raise TypeError(f"pixels are uint8, not {pixels.dtype}")
    if pixels.ndim != 3 or not 1 <= pixels.shape[2] <= 4:
        raise ValueError(f"pixels are [height, width, 1 to 4 channels], not {list(pixels.shape)}")
    height, width, channels = pixels.shape
    if pixels.strides[1:] != (channels, 1):
        pixels = np.ascontiguousarray(pixels)
    out = np.empty((max(crop.out_height, 0), max(crop.out_width, 0), channels), np.uint8)
    message = _scratch.message
    first = _address(pixels) if pixels.flags.carray else pixels.ctypes.data
    outcome = library.stoker_pixels_crop(
        first, height, width, channels, pixels.strides[0],
        byref(crop), _address(out), message,
    )  # fmt: skip
    if outcome:
        _fail(outcome, message)
    return out


def png_size(data: bytes) -> tuple[int, int]:
    """Return height and width of a PNG that ``png_decode`` may decode. It reads only the header.

    Raises OSError if it is another file.
    """
    found, message = _scratch.size, _scratch.message
    outcome = _png_size(data, len(data), found, message)
    if outcome:
        _fail(outcome, message)
    return found[0], found[1]


def png_decode(data: bytes, *, max_pixels: int) -> NDArray[np.uint8] | None:
    """Decode a PNG with 8 bits a channel to RGB ``uint8 [height, width, 3]``, without its alpha.

    Returns None for a file that another decoder has to take, or to refuse: with a palette, other
    bits, interlaced or animated, with more pixels than ``max_pixels``, damaged, or no PNG.
    """
    found, message, limits = _scratch.size, _scratch.message, Limits(max_pixels, 0)
    if _png_size(data, len(data), found, message) or found[0] * found[1] > max_pixels:
        return None
    out = np.empty((found[0], found[1], 3), np.uint8)
    outcome = library.stoker_png_decode(data, len(data), byref(limits), _address(out), message)
    return None if outcome else out


def read_windows(
    descriptors: NDArray[np.int32],
    starts: NDArray[np.int64],
    dtype: np.dtype[Any],
    inputs: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> int:
    """Read windows of integers from open files, and widen them.

    A window is ``length + 1`` integers: all but the last become a row of ``inputs``, all but the
    first a row of ``targets``.

    Args:
        descriptors: one file descriptor for each window, ``int32 [windows]``.
        starts: the byte at which each window begins, ``int64 [windows]``.
        dtype: of the integers in the files: signed, or unsigned of up to 4 bytes, in this machine's
            byte order.
        inputs, targets: ``int64 [windows, length]``, C-ordered; filled by this call.

    Returns the number of windows that were read, counted from the first. It is less than all if a
    file is too short or a read failed; later rows then hold arbitrary values.

    Raises TypeError or ValueError for other arguments.
    """
    windows, length = inputs.shape
    if dtype.kind not in "iu" or not dtype.isnative or dtype == np.uint64:
        raise TypeError(f"windows are read of native integers that fit into int64, not {dtype!r}")
    if not inputs.dtype == targets.dtype == starts.dtype == np.int64:
        raise TypeError("starts, inputs and targets are int64")
    if descriptors.dtype != np.int32:
        raise TypeError(f"descriptors are int32, not {descriptors.dtype}")
    if targets.shape != inputs.shape or not descriptors.shape == starts.shape == (windows,):
        raise ValueError("there is one descriptor and one start for each row of inputs and targets")
    if not inputs.size:
        return len(inputs)
    arrays: list[Any] = [descriptors, starts, inputs, targets]
    # Raises where an array is not C-ordered, or cannot be written.
    first = [byref(ctypes.c_char.from_buffer(each)) for each in arrays]
    return int(
        library.stoker_read_windows(
            *first[:2], windows, dtype.itemsize, dtype.kind == "i", length, *first[2:]
        )
    )


def read_files(paths: Sequence[str]) -> list[bytes]:
    """Read regular files, or links to them, in a single call without the GIL.

    Returns the contents of the first of them: of fewer than all where they have more than 4 MiB
    together, or where one cannot be read. Another call says why.
    """
    out, count = _scratch.files, len(paths)
    names, sizes = (c_char_p * count)(*map(os.fsencode, paths)), (c_int64 * count)()
    done = library.stoker_read_files(names, count, out.ctypes.data, out.size, sizes)
    found, start = [], 0
    for size in sizes[:done]:
        found.append(out[start : start + size].tobytes())
        start += size
    return found


def look_up_pixels(
    pixels: NDArray[np.uint8],
    table: NDArray[Any],
    out: NDArray[Any],
    *,
    in_planes: bool,
    out_planes: bool,
) -> None:
    """Replace each byte of images by its entry in a table: ``table[channel, byte]``.

    Args:
        pixels: ``uint8 [n, height, width, channels]``, or ``[n, channels, height, width]`` with
            ``in_planes``; C-ordered.
        table: ``[channels, 256]``, of items of 1, 2 or 4 bytes; C-ordered.
        out: of the table's dtype, C-ordered and writable: ``[n, height, width, channels]``, or
            ``[n, channels, height, width]`` with ``out_planes``.
        in_planes, out_planes: whether channels come before height and width. From planes to pixels
            is not supported.

    Raises TypeError or ValueError for other arguments.
    """
    if pixels.dtype != np.uint8 or out.dtype != table.dtype or table.itemsize not in (1, 2, 4):
        raise TypeError(
            "pixels are uint8, and the numbers those of a table of 1, 2 or 4 bytes each"
        )
    if pixels.ndim != 4 or table.shape != (pixels.shape[1 if in_planes else 3], 256):
        raise ValueError(f"pixels {list(pixels.shape)} do not have the channels of the table")
    n, channels = len(pixels), len(table)
    height, width = pixels.shape[2:] if in_planes else pixels.shape[1:3]
    planes, beside = (n, channels, height, width), (n, height, width, channels)
    if in_planes > out_planes or out.shape != (planes if out_planes else beside):
        raise ValueError(f"numbers {list(out.shape)} do not fit pixels {list(pixels.shape)}")
    if not all(each.flags.c_contiguous for each in (pixels, table, out)) or not out.flags.writeable:
        raise ValueError("pixels, the table and the numbers are C-ordered, and these are writable")
    library.stoker_look_up_pixels(
        pixels.ctypes.data, n, height * width, channels, table.ctypes.data, table.itemsize,
        in_planes, out_planes, out.ctypes.data,
    )  # fmt: skip


def paths() -> list[str]:
    """Return the instruction sets that this processor supports, the fastest one first."""
    return str(library.stoker_paths().decode()).split()


def use_path(name: str) -> None:
    """Let all threads resample with this instruction set from now on; "" is the fastest one.

    Raises ValueError if the processor or the library does not support it.
    """
    if not library.stoker_use_path(name.encode()):
        raise ValueError(f"{name!r} is none of {', '.join(paths())}")


def last_path() -> str:
    """Return the instruction set of this thread's last resampling, "" before the first."""
    return str(library.stoker_last_path().decode())


def _fail(outcome: int, message: ctypes.Array[ctypes.c_char]) -> NoReturn:
    words = message.value.decode(errors="replace")
    if outcome == _DAMAGED:
        raise OSError(words)
    if outcome == _TOO_LARGE:
        raise TooLarge(words)
    if outcome == _NO_MEMORY:
        raise MemoryError(words)
    raise ValueError(words)
