"""Turns a function of one image into a map of images and batches, random or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import AnyCallable, reads_only
from stoker.basics.pytree import Together
from stoker.basics.thread_safety import thread_safe
from stoker.images import native

Address = tuple[NDArray[np.uint64], NDArray[np.uint64]]
"""Where the generators of many images begin: the key of NumPy's Philox, ``uint64 [2]``, and words 1
and 2 of its counter for each image, ``uint64 [images, 2]``; words 0 and 3 are 0."""

Many = Callable[[Sequence[Any], Address | None], list[Any]]
"""A function of many images that takes the GIL once for all of them.

It gets the images, and their address if the function of one image draws. It returns None in place
of an image that the function of one has to take, such as one that it raises an error for.
"""


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


@thread_safe
@without_gil
@reads_only
@dataclass(frozen=True)
class ImageMap:
    """A function of an image that also takes a batch. It is picklable."""

    name: str
    fn: Callable[..., Any]
    many: Many | None = None

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, images: Any) -> Any:
        return _each(images, self.fn)


@thread_safe
@without_gil
@reads_only
class RandomImageMap(ImageMap):
    """A random function of an image that also takes a batch, and draws for each image of it."""

    def __call__(self, images: Any, rng: np.random.Generator) -> Any:  # type: ignore[override]
        if not isinstance(rng, np.random.Generator):
            raise TypeError(
                f"{self.name} needs a NumPy generator, not a {type(rng).__name__}: put this stage "
                "before .to_torch()"
            )
        return _each(images, partial(self.fn, rng=rng))


def many_of(fn: Any) -> Many | None:
    """Return what does the work of an image function on many images; None if nothing does."""
    return fn.many if isinstance(fn, ImageMap) and native.library() is not None else None


def _each(images: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply a function to an image, or to each image of a batch, with what belongs to it.

    A batch is a list, an array with four axes, or an object array; masks and boxes come in lists or
    arrays, and go in such. An exception gets a note with the image's number in the batch.
    """
    if not isinstance(images, Together):
        return _stacked(_of_each(images, fn)) if _is_batch(images) else fn(images)
    if not images or not _is_batch(images[0]):
        return fn(images)
    n = len(images[0])
    for at, other in enumerate(images[1:], 2):
        if not isinstance(other, (list, np.ndarray)) or len(other) != n:
            raise TypeError(
                f"field {at} of on= must be an array or a list with one entry for each of {n} "
                "images: put this stage before .batch()"
            )
    made = _of_each([Together(row) for row in zip(*images, strict=True)], fn)
    first, *others = ([row[at] for row in made] for at in range(len(images)))
    return Together((_stacked(first), *map(_like, images[1:], others)))


def _is_batch(images: Any) -> bool:
    if isinstance(images, np.ndarray):
        return images.ndim == 4 or images.dtype == object
    return isinstance(images, (list, tuple))


def _of_each(images: Any, fn: Callable[[Any], Any]) -> list[Any]:
    results: list[Any] = []
    for at, image in enumerate(images):
        try:
            results.append(fn(image))
        except Exception as error:
            error.add_note(f"in image {at} of a batch of {len(images)}")
            raise
    return results


def _stacked(results: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    if not results:
        raise ValueError("the batch has no images")
    for at, result in enumerate(results):
        if result.shape != results[0].shape:
            raise ValueError(
                f"image {at} of the batch has become {list(result.shape)}, but the first "
                f"{list(results[0].shape)}, and one array holds images of one size only. Use a "
                "crop or resize((height, width)), or put this stage before .batch()"
            )
    return np.stack(results)


def _like(before: Any, made: list[NDArray[Any]]) -> Any:
    """Return masks or boxes of a batch in an array if they came in one, else in a list."""
    is_array = isinstance(before, np.ndarray) and before.dtype != object
    return np.stack(made) if is_array else made
