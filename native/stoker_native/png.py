"""PNGs of the usual kinds: Python's zlib inflates them, the library in C undoes the filters.

Pillow takes 1.8 times as long, most of it for the filters.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from stoker_native.functions import png_pixels

_BEGIN = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}
"""Of the colour types that are decoded here: all but palettes."""


def png_decode(data: bytes, *, max_pixels: int) -> NDArray[np.uint8] | None:
    """Decode a PNG with 8 bits a channel to RGB ``uint8 [height, width, 3]``, without its alpha.

    Returns None for a file that another decoder has to take, or to refuse: with a palette, other
    bits, interlaced or animated, with more pixels than ``max_pixels``, damaged, or no PNG.
    """
    if not data.startswith(_BEGIN):
        return None
    try:
        width, height, *kind = struct.unpack_from(">IIBBBBB", data, len(_BEGIN))
        bits, colours, *others = kind
        channels = _CHANNELS.get(colours)
        if bits != 8 or channels is None or any(others) or not 0 < width * height <= max_pixels:
            return None
        size = height * (1 + width * channels)
        inflating = zlib.decompressobj()
        # At most a byte more than there are pixels, whatever the stream holds.
        filtered = inflating.decompress(_stream(data), size + 1)
        if len(filtered) != size or not inflating.eof:
            return None
        return png_pixels(filtered, height, width, channels)
    except (struct.error, zlib.error, OSError):
        return None


def _stream(data: bytes) -> bytes:
    """Return the zlib stream of a file; nothing if it is animated.

    Raises OSError if a chunk before it is damaged, ``struct.error`` if the file ends early. The
    stream has a check of its own.
    """
    at, parts, view = 8, [], memoryview(data)
    while True:
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if kind == b"IDAT":
            parts.append(view[at + 8 : end])
        elif parts or kind == b"acTL":
            return b"".join(parts)
        elif struct.unpack_from(">I", data, end)[0] != zlib.crc32(view[at + 4 : end]):
            raise OSError("a chunk of the PNG is damaged")
        at = end + 4
