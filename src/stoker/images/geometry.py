"""Windows: the part of an image that a transform shows, and the same part of masks and boxes.

With ``on=["image", "mask", "boxes"]`` a transform draws one window from the size of the first
field, the image. The other fields are found by their shapes:

- masks, ``[height, width]`` or ``[height, width, channels]`` of the image's height and width, of
  any dtype. Each pixel of the result is that of the mask that is nearest to its centre, so that no
  classes are mixed; what lies outside the mask is 0.
- boxes, ``[n, 4]``: left, top, right and bottom in pixels, as torchvision's ``XYXY``. They are
  clipped to the window, and none is left out: a box outside has no area. The result is floating
  point, of the dtype of the boxes or ``float32``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Box(NamedTuple):
    """A part of an image, in pixels from its upper left corner."""

    top: float
    left: float
    height: float
    width: float


class ImageWindow(NamedTuple):
    """A box of an image, the height and width that it is shown with, and whether it is flipped."""

    box: Box
    size: tuple[int, int]
    flip: bool = False

    def show(self, companion: Any, image_size: tuple[int, int], at: int) -> NDArray[Any]:
        """Return this part of a mask or of boxes as a new array.

        Args:
            companion: the mask or the boxes.
            image_size: height and width of the image that they belong to.
            at: their place in ``on=``, for errors.

        Raises TypeError or ValueError if it is neither.
        """
        if are_boxes(companion, image_size, at):
            return self._boxes(companion)
        rows = _nearest(self.box.top, self.box.height, self.size[0])
        columns = _nearest(self.box.left, self.box.width, self.size[1])
        if self.flip:
            columns = columns[::-1]
        shown: NDArray[Any] = companion.take(rows, 0, mode="clip").take(columns, 1, mode="clip")
        shown[(rows < 0) | (rows >= len(companion))] = 0
        shown[:, (columns < 0) | (columns >= companion.shape[1])] = 0
        return shown

    def _boxes(self, boxes: NDArray[Any]) -> NDArray[Any]:
        (height, width), box = self.size, self.box
        shown = (boxes - np.array([box.left, box.top] * 2)) * (
            [width / box.width, height / box.height] * 2
        )
        if self.flip:
            shown[:, [0, 2]] = width - shown[:, [2, 0]]
        dtype = boxes.dtype if boxes.dtype.kind == "f" else np.float32
        clipped: NDArray[Any] = np.clip(shown, 0, [width, height] * 2).astype(dtype)
        return clipped


def are_boxes(
    companion: Any, image_size: tuple[int, int], at: int, *, images: int = 0, tensors: bool = False
) -> bool:
    """Return whether a field beside an image holds boxes; False if it is a mask.

    Args:
        companion, image_size, at: as ``ImageWindow.show`` takes them.
        images: how many images a batch has; 0 for one image.
        tensors: whether the images are tensors; otherwise they are NumPy's arrays.

    Raises TypeError or ValueError if it is neither.
    """
    name = f"field {at + 1} of on="
    if not hasattr(companion, "ndim") or tensors == isinstance(companion, np.ndarray):
        encoded = isinstance(companion, (bytes, bytearray, memoryview))
        raise TypeError(
            f"{name} must be {'a tensor' if tensors else 'an array'}, a mask or boxes, not "
            f"{type(companion).__name__}: "
            + (
                "decode masks before, such as by numpy.array(PIL.Image.open(io.BytesIO(data)))"
                if encoded
                else "convert it in a .map() before"
            )
        )
    shape = tuple(companion.shape)
    of_one = shape[1:] if images else shape
    is_mask = of_one[:2] == image_size and len(of_one) in (2, 3)
    if images and len(of_one) == 3:
        is_mask |= of_one[1:] == image_size  # channels first
    is_list = len(of_one) == 2 and of_one[1] == 4
    if is_mask != is_list and (not images or shape[0] == images):
        return is_list
    height, width = image_size
    if is_mask and is_list:
        raise ValueError(
            f"{name} has {list(shape)}: that could be a mask of the image, {height} x {width}, or "
            f"{height} boxes. Give masks a last axis of 1"
        )
    raise ValueError(
        f"{name} has {list(shape)}, which is no mask of the image, {height} x {width}, and no "
        "boxes, [n, 4] (no boxes are numpy.zeros((0, 4)))"
    )


def _nearest(start: float, length: float, count: int) -> NDArray[np.intp]:
    """Return the pixels under the centres of ``count`` equal parts of a length."""
    centres = start + (np.arange(count) + 0.5) * length / count
    nearest: NDArray[np.intp] = np.floor(centres).astype(np.intp)
    return nearest
