"""Turns a function of one image into a map of images and batches, random or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import AnyCallable, reads_only
from stoker.images import native


def without_gil(fn: AnyCallable) -> AnyCallable:
    """Mark a function or class: with ``stoker-native`` it works without the GIL."""
    fn._releases_gil = True  # type: ignore[attr-defined]
    return fn


def releases_gil(fn: Any) -> bool:
    """True if a function is marked and ``stoker-native`` is installed: Pillow holds the GIL."""
    while isinstance(fn, partial):
        fn = fn.func
    is_marked = getattr(fn, "_releases_gil", None) is True and not hasattr(fn, "__wrapped__")
    return is_marked and native.library() is not None


@without_gil
@reads_only
@dataclass(frozen=True)
class ImageMap:
    """A function of an image that also takes a batch. It is picklable."""

    name: str
    fn: Callable[..., NDArray[np.uint8]]

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, images: Any) -> NDArray[np.uint8]:
        return _each(images, self.fn)


@without_gil
@reads_only
@dataclass(frozen=True)
class RandomImageMap:
    """A random function of an image that also takes a batch, and draws for each image of it."""

    name: str
    fn: Callable[..., NDArray[np.uint8]]

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, images: Any, rng: np.random.Generator) -> NDArray[np.uint8]:
        if not isinstance(rng, np.random.Generator):
            raise TypeError(
                f"{self.name} needs a NumPy generator, not a {type(rng).__name__}: put this stage "
                "before .to()"
            )
        return _each(images, partial(self.fn, rng=rng))


def _each(images: Any, fn: Callable[[Any], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Apply a function to an image, or to each image of a batch.

    A batch is a list, an array with four axes, or an object array. An exception gets a note with
    the image's number in the batch.
    """
    is_array = isinstance(images, np.ndarray)
    if not isinstance(images, (list, tuple)) and not (
        is_array and (images.ndim == 4 or images.dtype == object)
    ):
        return fn(images)
    results: list[NDArray[np.uint8]] = []
    for at, image in enumerate(images):
        try:
            results.append(fn(image))
        except Exception as error:
            error.add_note(f"in image {at} of a batch of {len(images)}")
            raise
        if results[at].shape != results[0].shape:
            raise ValueError(
                f"image {at} of the batch has become {list(results[at].shape)}, but the first "
                f"{list(results[0].shape)}, and one array holds images of one size only. Use a "
                "crop or resize((height, width)), or put this stage before .batch()"
            )
    if not results:
        raise ValueError("the batch has no images")
    return np.stack(results)
