"""Random changes to whole batches of images: new randomness for each use of an echoed batch.

Each function has the form ``fn(batch, rng)``, for ``stoker.echo(loader, transform=...)`` and
``.random_map()``; set further arguments with ``functools.partial``. It works on NumPy arrays and on
torch tensors, on the tensors' device, and draws only from the given generator. It returns a new
batch and does not change its argument.

The images of a batch are its only array with four axes; if none has four, its only array with
three: ``[n, height, width]``, ``[n, height, width, channels]`` or ``[n, channels, height, width]``.
The channel axis has length 1, 3 or 4. If both readings are possible, tensors have channels first
and arrays have them last. Three axes with channels last are one image, ``[height, width,
channels]``. One image with channels first would be read as a batch of grey images.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from stoker.basics import pytree
from stoker.basics.buffers import reads_only
from stoker.basics.pytree import Together
from stoker.basics.thread_safety import thread_safe
from stoker.images.geometry import are_boxes

# Grey, RGB, RGBA: an axis of another length does not hold channels.
_CHANNELS = (1, 3, 4)
# The largest aspect ratio of an erased box, as in the paper (Zhong et al., arXiv 1708.04896), which
# uses 0.3 to 3.3.
_ASPECT = 3.3


@thread_safe
@reads_only
def hflip(images: Any) -> Any:
    """Flip an image, or each image of a batch, left to right.

    Args:
        images: one image ``[height, width, channels]``, or images as ``random_hflip`` takes them.

    Returns, raises: as ``random_hflip``.
    """
    if isinstance(images, Together):
        return _flip_together(images, None, "hflip")
    return _with_images(images, _flip, "hflip")


@thread_safe
@reads_only
def random_hflip(batch: Any, rng: Any, *, p: float = 0.5) -> Any:
    """Flip each image left to right with a probability.

    Safe if left and right have no meaning, as in photographs of things or cells. Not safe for text
    or digits. Labels that are positions are flipped too if ``on=`` names them behind the images:
    ``.random_map(random_hflip, on=["image", "mask", "boxes"])``.

    Args:
        batch: images, or a structure with images in it: a batch, or one image with channels last.
        rng: a ``numpy.random.Generator``, or a ``torch.Generator`` of the images' device.
        p: the probability.

    Returns:
        A new batch, which shares everything but the images with the argument.

    Raises:
        ValueError: the batch has no images, or several arrays that could be images.
    """

    def choose(images: Any) -> Any:
        return _uniform(rng, (len(images),), images) < p

    def change(images: Any) -> Any:
        return _where(_per_image(choose(images), images), _flip(images), images)

    if isinstance(batch, Together):
        return _flip_together(batch, choose, "random_hflip")
    return _with_images(batch, change, "random_hflip")


@thread_safe
@reads_only
def random_erase(
    batch: Any, rng: Any, *, p: float = 0.5, area_fraction: tuple[float, float] = (0.02, 0.2)
) -> Any:
    """Cover a rectangle of each image with the image's mean colour, with a probability.

    Safe if any part of the image is enough to know its label. Not safe if the label may depend on
    something small. After Zhong et al., arXiv 1708.04896, section 3.2.

    Args:
        batch, rng: as in ``random_hflip``.
        p: the probability.
        area_fraction: the smallest and the largest covered fraction of the image's area. The
            rectangle's sides differ by at most a factor of 3.3, and end at the image's border.

    Returns, raises: as ``random_hflip``.
    """

    def erase(images: Any) -> Any:
        row_axis, column_axis, _ = _axes(images)
        height, width = images.shape[row_axis], images.shape[column_axis]
        draws = _uniform(rng, (5, len(images)), images)
        low, high = area_fraction
        area = (low + (high - low) * draws[0]) * height * width
        aspect = _ASPECT ** (2 * draws[1] - 1)
        tall, wide = (area * aspect) ** 0.5, (area / aspect) ** 0.5
        erased = (draws[4] < p)[:, None, None]
        erased = erased & _cover(draws[2], tall, height, images)[:, :, None]
        erased = erased & _cover(draws[3], wide, width, images)[:, None, :]
        if images.ndim == 4:
            erased = erased[:, None] if row_axis == 2 else erased[..., None]
        return _where(erased, _mean(images, (row_axis, column_axis)), images)

    return _with_images(batch, erase, "random_erase")


def _flip(images: Any) -> Any:
    column_axis = _axes(images)[1]
    return images.flip(column_axis) if _is_torch(images) else np.flip(images, column_axis).copy()


def _flip_together(values: Together, choose: Callable[[Any], Any] | None, name: str) -> Together:
    """Flip images, the first of some fields, with their masks and boxes.

    Args:
        values: images, or one image, and what belongs to them.
        choose: tells which images; all if None.
        name: of the function, for errors.
    """
    images = _images(values[:1], name)
    is_one = _is_one(images)
    size = _size(images[None] if is_one else images)
    flipped = []
    count, tensors = 0 if is_one else len(images), not isinstance(images, np.ndarray)
    chosen = None if choose is None else choose(images[None] if is_one else images)
    for at, value in enumerate(values):
        is_list = at > 0 and are_boxes(value, size, at, images=count, tensors=tensors)
        batch = value[None] if is_one else value
        if is_list:
            batch = _to_floating(batch)
            made = _flip_boxes(batch, size[1])
        else:
            made = _flip(batch) if at == 0 else _flip_masks(batch, size)
        if chosen is not None:
            made = _where(_per_image(chosen, made), made, batch)
        flipped.append(made[0] if is_one else made)
    return Together(flipped)


def _flip_boxes(boxes: Any, width: int) -> Any:
    made = boxes.clone() if _is_torch(boxes) else boxes.copy()
    made[..., 0], made[..., 2] = width - boxes[..., 2], width - boxes[..., 0]
    return made


def _flip_masks(masks: Any, size: tuple[int, int]) -> Any:
    axis = 2 if tuple(masks.shape[1:3]) == size else 3
    return masks.flip(axis) if _is_torch(masks) else np.flip(masks, axis).copy()


def _size(images: Any) -> tuple[int, int]:
    row_axis, column_axis, _ = _axes(images)
    return images.shape[row_axis], images.shape[column_axis]


def _is_one(images: Any) -> bool:
    return bool(images.ndim == 3 and images.shape[2] in _CHANNELS)


def _with_images(batch: Any, change: Callable[[Any], Any], name: str) -> Any:
    images = _images(batch, name)
    changed = change(images[None])[0] if _is_one(images) else change(images)
    return pytree.map_leaves(lambda leaf: changed if leaf is images else leaf, batch)


def _images(batch: Any, name: str) -> Any:
    """Return the leaf of a batch that holds its images. Raises ValueError."""
    arrays = [leaf for leaf in pytree.leaves(batch) if _is_array(leaf)]
    for ndim in (4, 3):
        found = [leaf for leaf in arrays if leaf.ndim == ndim]
        if len(found) == 1:
            return found[0]
        if found:
            break
    shapes = ", ".join(str(list(leaf.shape)) for leaf in arrays) or "no arrays"
    if any(isinstance(leaf, bytes) for leaf in pytree.leaves(batch)):
        shapes += " (bytes are encoded images: decode or crop them first)"
    if any(pytree.is_jax_array(leaf) for leaf in pytree.leaves(batch)):
        shapes += " (change images before .to_jax() makes them JAX arrays)"
    problem = "several arrays that could be images" if found else "no images"
    raise ValueError(
        f"stoker.images.{name} found {problem} in a batch of {shapes}. Images have four axes (or "
        "three, without channels). Give on= the name of their field"
    )


def _axes(images: Any) -> tuple[int, int, int | None]:
    """Return the axes of height, width and channels."""
    if images.ndim == 3:
        return 1, 2, None
    first, last = images.shape[1] in _CHANNELS, images.shape[3] in _CHANNELS
    if first and (not last or _is_torch(images)):
        return 2, 3, 1
    return 1, 2, 3


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or pytree.is_tensor(leaf)


def _is_torch(value: Any) -> bool:
    return not isinstance(value, np.ndarray)


def _uniform(rng: Any, shape: tuple[int, ...], images: Any) -> Any:
    """Draw ``float32`` from [0, 1), on the images' device."""
    if isinstance(rng, np.random.Generator):
        draws = rng.random(shape, np.float32)
        if not _is_torch(images):
            return draws
        return sys.modules["torch"].from_numpy(draws).to(images.device, non_blocking=True)
    return sys.modules["torch"].rand(shape, generator=rng, device=rng.device)


def _per_image(chosen: Any, images: Any) -> Any:
    return chosen.reshape(-1, *[1] * (images.ndim - 1))


def _cover(place: Any, length: Any, room: int, images: Any) -> Any:
    """Return which of ``room`` rows or columns each rectangle covers, bool [n, room]."""
    if _is_torch(images):
        places = sys.modules["torch"].arange(room, device=images.device)[None]
    else:
        places = np.arange(room)[None]
    start = (place * (room - length).clip(0))[:, None]
    return (places >= start) & (places < start + length[:, None])


def _mean(images: Any, axes: tuple[int, int]) -> Any:
    pixels = _to_floating(images)
    mean = (
        pixels.mean(axes, keepdim=True) if _is_torch(images) else pixels.mean(axes, keepdims=True)
    )
    return _to_dtype(mean, images)


def _where(chosen: Any, new: Any, old: Any) -> Any:
    return (
        sys.modules["torch"].where(chosen, new, old)
        if _is_torch(old)
        else np.where(chosen, new, old)
    )


def _to_floating(images: Any) -> Any:
    if _is_torch(images):
        return images if images.is_floating_point() else images.float()
    return images if images.dtype.kind == "f" else images.astype(np.float32)


def _to_dtype(pixels: Any, images: Any) -> Any:
    """Return pixels in the images' dtype; integers are rounded and clipped to its range."""
    if _is_torch(images):
        if images.is_floating_point():
            return pixels.to(images.dtype)
        limits = sys.modules["torch"].iinfo(images.dtype)
        return pixels.round().clamp(limits.min, limits.max).to(images.dtype)
    if images.dtype.kind == "f":
        return pixels.astype(images.dtype)
    bounds = np.iinfo(images.dtype)
    return pixels.round().clip(bounds.min, bounds.max).astype(images.dtype)
