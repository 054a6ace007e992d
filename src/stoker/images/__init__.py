"""Images: decoding, cropping and random changes (extras ``[images]`` and ``[fast]``).

With ``stoker-native``, a crop of a JPEG decodes only the part that it needs, and most PNGs are
decoded faster. Without it, Pillow does all the work, and gives the same pixels within one level.
"""

from stoker.images.augmenting import hflip, random_erase, random_hflip
from stoker.images.cropping import (
    center_crop,
    random_crop,
    random_resized_crop,
    resize,
    resize_center_crop,
)
from stoker.images.decoding import decode, read_size
from stoker.images.jitter import color_jitter
from stoker.images.normalizing import normalize, to_chw

__all__ = [
    "center_crop",
    "color_jitter",
    "decode",
    "hflip",
    "normalize",
    "random_crop",
    "random_erase",
    "random_hflip",
    "random_resized_crop",
    "read_size",
    "resize",
    "resize_center_crop",
    "to_chw",
]
