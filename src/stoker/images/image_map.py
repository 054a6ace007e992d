"""Functions of one image as maps of images and of batches, random ones too."""

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
    """Mark a function, or a class of them, whose work ``stoker-native`` does without the GIL."""
    fn._releases_gil = True  # type: ignore[attr-defined]
    return fn


def releases_gil(fn: Any) -> bool:
    """Return whether a function is marked so, and the library there: Pillow often has the GIL."""
    while isinstance(fn, partial):
        fn = fn.func
    is_marked = getattr(fn, "_releases_gil", None) is True and not hasattr(fn, "__wrapped__")
    return is_marked and native.library() is not None


@without_gil
@reads_only
@dataclass(frozen=True)
class ImageMap:
    """A function of an image that also takes a batch; it pickles."""

    called: str
    fn: Callable[..., NDArray[np.uint8]]

    @property
    def __name__(self) -> str:
        return self.called

    def __call__(self, images: Any) -> NDArray[np.uint8]:
        return _each(images, self.fn)


@without_gil
@reads_only
@dataclass(frozen=True)
class RandomImageMap:
    """The same with a generator, which is drawn from for each image of a batch."""

    called: str
    fn: Callable[..., NDArray[np.uint8]]

    @property
    def __name__(self) -> str:
        return self.called

    def __call__(self, images: Any, rng: np.random.Generator) -> NDArray[np.uint8]:
        if not isinstance(rng, np.random.Generator):
            raise TypeError(
                f"{self.called} draws from a generator of NumPy, not {type(rng).__name__}: put it "
                "before .to()"
            )
        return _each(images, partial(self.fn, rng=rng))


def _each(images: Any, fn: Callable[[Any], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Apply a function to an image, or to each of a batch: a list, four axes, or an object array.

    An exception gets a note of which image of a batch it is about.
    """
    is_array = isinstance(images, np.ndarray)
    if not isinstance(images, (list, tuple)) and not (
        is_array and (images.ndim == 4 or images.dtype == object)
    ):
        return fn(images)
    made: list[NDArray[np.uint8]] = []
    for at, image in enumerate(images):
        try:
            made.append(fn(image))
        except Exception as error:
            error.add_note(f"in image {at} of a batch of {len(images)}")
            raise
        if made[at].shape != made[0].shape:
            raise ValueError(
                f"image {at} of the batch has become {list(made[at].shape)}, and the first "
                f"{list(made[0].shape)}: one array holds images of one size, as resize((height, "
                "width)) and crops make them; or put this before .batch()"
            )
    if not made:
        raise ValueError("a batch of no images")
    return np.stack(made)
