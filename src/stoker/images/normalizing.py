"""Turns pixels into inputs of a network: floating point, normalized, channels first."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import reads_only
from stoker.images.decoding import check_is_no_image

# The means of ImageNet's training images by channel, for pixels from 0 to 1: torchvision's figures,
# with which its weights were trained.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
# The standard deviations, from the same source.
IMAGENET_STD = (0.229, 0.224, 0.225)


Channels = Sequence[float] | NDArray[np.floating[Any]]


def normalize(mean: Channels = IMAGENET_MEAN, std: Channels = IMAGENET_STD) -> Callable[[Any], Any]:
    """Subtract a mean from each channel, and divide by a standard deviation.

    Args:
        mean, std: one number for each channel, for pixels from 0 to 1. By default ImageNet's.

    Returns:
        A function for ``.map(fn, on="image")``. It takes one image or a batch, as an array or a
        torch tensor, with channels last or before height and width. It returns ``float32`` in the
        same layout. ``uint8`` is divided by 255 first; floating point is not scaled. It raises
        TypeError for other dtypes, and ValueError if no axis of an image is as long as ``mean``.

    Raises:
        TypeError: ``mean`` or ``std`` are not numbers.
        ValueError: ``mean`` and ``std`` have different lengths, or a deviation is not above 0.
    """
    check_is_no_image(mean, "means", ".map(stoker.images.normalize(), on='image')")
    try:
        means, stds = ([float(each) for each in given] for given in (mean, std))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"normalize needs a mean and a deviation for each channel, not {mean!r} and {std!r}"
        ) from error
    if len(means) != len(stds) or not means or not all(0 < each < math.inf for each in stds):
        raise ValueError(
            f"normalize needs as many means as deviations, and deviations above 0, not {means} and "
            f"{stds}"
        )
    return _Normalized(tuple(means), tuple(stds))


@reads_only
def to_chw(images: Any) -> Any:
    """Move the last axis, the channels, before height and width, as PyTorch needs it.

    Args:
        images: one image ``[height, width, channels]`` or a batch ``[n, height, width, channels]``:
            an array of NumPy or JAX, or a torch tensor.

    Returns:
        A new contiguous array or tensor of the same kind and dtype.

    Raises:
        TypeError: ``images`` is neither an array nor a tensor.
        ValueError: it does not have three or four axes.
    """
    _check_pixels(images)
    if images.ndim not in (3, 4):
        raise ValueError(
            f"an image must have three axes, and a batch four, but this has {list(images.shape)}"
        )
    if pytree.is_tensor(images):
        return images.movedim(-1, -3).contiguous()
    if pytree.is_jax_array(images):
        return images.swapaxes(-1, -2).swapaxes(-2, -3)
    return np.ascontiguousarray(np.moveaxis(images, -1, -3))


@reads_only
@dataclass(frozen=True)
class _Normalized:
    mean: tuple[float, ...]
    std: tuple[float, ...]
    __name__ = "normalize"

    def __call__(self, images: Any) -> Any:
        _check_pixels(images)
        shape = [1] * images.ndim
        shape[self._axis(images)] = len(self.mean)
        mean, std = (np.array(x, np.float32).reshape(shape) for x in (self.mean, self.std))
        is_tensor = pytree.is_tensor(images)
        if not (images.is_floating_point() if is_tensor else images.dtype.kind == "f"):
            if str(images.dtype).removeprefix("torch.") != "uint8":
                raise TypeError(f"normalize needs uint8 or floating point, not {images.dtype}")
            mean, std = mean * 255, std * 255
        if is_tensor:
            torch = sys.modules["torch"]
            scale, shift = (torch.from_numpy(x).to(images.device) for x in (1 / std, mean / std))
            return images.to(torch.float32) * scale - shift
        made = images.astype(np.float32)
        made *= 1 / std
        made -= mean / std
        return made

    def _axis(self, images: Any) -> int:
        channels, last = len(self.mean), -1
        order = (-3, last) if pytree.is_tensor(images) else (last, -3)
        for axis in order:
            if images.ndim in (3, 4) and images.shape[axis] == channels:
                return axis
        raise ValueError(
            f"normalize has {channels} means, but images of {list(images.shape)} have no channel "
            "axis of that length: give one mean and deviation for each channel"
        )


def _check_pixels(images: Any) -> None:
    if not hasattr(images, "ndim"):
        raise TypeError(
            f"pixels must be an array or a tensor, not {type(images).__name__}: decode or crop "
            "files first, and give on= the name of the field with the image"
        )
