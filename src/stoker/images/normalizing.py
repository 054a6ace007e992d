"""Turns pixels into inputs of a network: floating point, normalized, channels first."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Recycler, reads_only
from stoker.basics.thread_safety import thread_safe
from stoker.images import native
from stoker.images.decoding import check_is_no_image
from stoker.images.image_map import without_gil

# The means of ImageNet's training images by channel, for pixels from 0 to 1: torchvision's figures,
# with which its weights were trained.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
# The standard deviations, from the same source.
IMAGENET_STD = (0.229, 0.224, 0.225)
_DTYPES = ("float32", "float16", "bfloat16")

Channels = Sequence[float] | NDArray[np.floating[Any]]


def normalize(
    mean: Channels = IMAGENET_MEAN, std: Channels = IMAGENET_STD, *, dtype: str = "float32"
) -> Callable[[Any], Any]:
    """Subtract a mean from each channel, and divide by a standard deviation.

    In a pipeline, ``normalize`` and ``to_chw`` next to each other are one pass over the bytes of a
    batch in ``stoker-native``, in either order, before ``.to_torch()`` or behind it.

    Example: ``.map(stoker.images.to_chw, on="image").map(stoker.images.normalize(), on="image")``

    Args:
        mean, std: one number for each channel, for pixels from 0 to 1. By default ImageNet's.
        dtype: of the result: "float32", "float16", or "bfloat16", which NumPy does not have: put
            ``.to_torch()`` before. All are calculated in ``float32``.

    Returns:
        A function for ``.map(fn, on="image")``. It takes one image or a batch, as an array or a
        torch tensor, with channels last or before height and width. It returns a new array or
        tensor in the same layout. ``uint8`` is divided by 255 first; floating point is not scaled.
        It raises TypeError for other dtypes, and ValueError if no axis of an image is as long as
        ``mean``.

    Raises:
        TypeError: ``mean`` or ``std`` are not numbers.
        ValueError: ``mean`` and ``std`` have different lengths, a deviation is not above 0, or
            there is no such ``dtype``.
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
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"normalize returns {', '.join(_DTYPES)}, not {dtype!r}")
    return _Normalized(tuple(means), tuple(stds), name)


def fused(first: Any, then: Any) -> Callable[[Any], Any] | None:
    """Return one function for both maps if they are ``to_chw`` and ``normalize``, else None.

    Its result equals ``then(first(images))`` bit for bit.
    """
    if first is to_chw and type(then) is _Normalized:
        return _NormalizedPlanes(then, is_moved_first=True)
    if type(first) is _Normalized and then is to_chw:
        return _NormalizedPlanes(first, is_moved_first=False)
    return None


@thread_safe
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


@thread_safe
@without_gil
@reads_only
@dataclass(frozen=True)
class _Normalized:
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: str
    # Batches of the size of a network's inputs cost more page faults than work, if new.
    memory: Recycler = field(default_factory=Recycler, compare=False, repr=False)
    __name__ = "normalize"

    def __reduce__(self) -> Any:
        return _Normalized, (self.mean, self.std, self.dtype)

    def __call__(self, images: Any) -> Any:
        _check_pixels(images)
        axis = self._axis(images)
        if (found := _bytes_of(images)) is not None:
            in_planes = axis == -3
            return self._looked_up(images, found, in_planes=in_planes, out_planes=in_planes)
        shape = [1] * images.ndim
        shape[axis] = len(self.mean)
        scale, shift = (each.reshape(shape) for each in self._scale_and_shift(_is_byte(images)))
        if pytree.is_tensor(images):
            torch = sys.modules["torch"]
            # A copy that blocks would wait for the training steps before it. Without a pin the
            # driver has taken these few bytes when the call returns.
            device = images.device
            scale, shift = (
                torch.from_numpy(each).to(device, non_blocking=True) for each in (scale, shift)
            )
            return (images.to(torch.float32) * scale - shift).to(getattr(torch, self.dtype))
        made = images.astype(np.float32)
        made *= scale
        made -= shift
        return made.astype(self._array_dtype(), copy=False)

    def planes(self, images: Any) -> Any:
        """Return images with channels last as normalized images with channels first, in one pass.

        None if that is not possible, or if another axis could be mistaken for the channels.
        """
        channels = len(self.mean)
        shape: tuple[int, ...] = tuple(getattr(images, "shape", ()))
        found = _bytes_of(images) if len(shape) in (3, 4) else None
        if found is None or shape[-1] != channels or channels in shape[-3:-1]:
            return None
        return self._looked_up(images, found, in_planes=False, out_planes=True)

    def _looked_up(
        self, images: Any, pixels: NDArray[np.uint8], *, in_planes: bool, out_planes: bool
    ) -> Any:
        shape = pixels.shape
        if out_planes and not in_planes:
            shape = (*shape[:-3], shape[-1], *shape[-3:-1])
        table = self._table(pytree.is_tensor(images))
        out = self.memory.array(shape, table.dtype)
        native.library().look_up_pixels(  # type: ignore[union-attr]
            pixels.reshape(-1, *pixels.shape[-3:]),
            table,
            out.reshape(-1, *shape[-3:]),
            in_planes=in_planes,
            out_planes=out_planes,
        )
        if not pytree.is_tensor(images):
            return out
        torch = sys.modules["torch"]
        return torch.from_numpy(out).view(getattr(torch, self.dtype))

    def _table(self, is_tensor: bool) -> NDArray[Any]:
        """Return the result for each channel and byte, ``[channels, 256]``.

        torch's ``bfloat16`` is given as integers.
        """
        scale, shift = (each[:, None] for each in self._scale_and_shift(True))
        table = np.arange(256, dtype=np.float32) * scale - shift
        if is_tensor and self.dtype == "bfloat16":
            torch = sys.modules["torch"]
            whole: NDArray[Any] = torch.from_numpy(table).bfloat16().view(torch.int16).numpy()
            return whole
        return table.astype(self._array_dtype())

    def _scale_and_shift(self, is_byte: bool) -> list[NDArray[np.float32]]:
        mean, std = (
            np.array(x, np.float32) * (255 if is_byte else 1) for x in (self.mean, self.std)
        )
        return [1 / std, mean / std]

    def _array_dtype(self) -> np.dtype[Any]:
        try:
            return np.dtype(self.dtype)
        except TypeError:
            raise TypeError(
                f"NumPy has no {self.dtype}: put .to_torch() or .to_torch('cuda') before normalize"
            ) from None

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


@thread_safe
@without_gil
@reads_only
@dataclass(frozen=True)
class _NormalizedPlanes:
    """``to_chw`` and ``normalize`` in one pass, if the result is the same."""

    normalized: _Normalized
    is_moved_first: bool

    @property
    def __name__(self) -> str:
        return "to_chw + normalize" if self.is_moved_first else "normalize + to_chw"

    def __call__(self, images: Any) -> Any:
        made = self.normalized.planes(images)
        if made is not None:
            return made
        if self.is_moved_first:
            return self.normalized(to_chw(images))
        return to_chw(self.normalized(images))


def _bytes_of(images: Any) -> NDArray[np.uint8] | None:
    """Return images as an array of bytes that ``stoker-native`` accepts; None if it cannot."""
    if native.library() is None or not _is_byte(images):
        return None
    if pytree.is_tensor(images):
        if images.device.type != "cpu" or not images.is_contiguous() or images.requires_grad:
            return None
        images = images.numpy()
    if type(images) is not np.ndarray or not images.flags.c_contiguous:
        return None
    found: NDArray[np.uint8] = images
    return found


def _is_byte(images: Any) -> bool:
    """True for ``uint8``, False for floating point. Raises TypeError for other dtypes."""
    name = str(images.dtype).removeprefix("torch.")
    if name == "uint8":
        return True
    if images.is_floating_point() if pytree.is_tensor(images) else images.dtype.kind == "f":
        return False
    raise TypeError(f"normalize needs uint8 or floating point, not {images.dtype}")


def _check_pixels(images: Any) -> None:
    if not hasattr(images, "ndim"):
        raise TypeError(
            f"pixels must be an array or a tensor, not {type(images).__name__}: decode or crop "
            "files first, and give on= the name of the field with the image"
        )
