"""Functions of one image as maps of images and of batches, random ones too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.lending import AnyCallable, reads_only


def without_gil(fn: AnyCallable) -> AnyCallable:
    """Mark a function, or a class of functions, whose work is mostly done without the GIL."""
    fn._releases_gil = True  # type: ignore[attr-defined]
    return fn


def releases_gil(fn: Any) -> bool:
    """Return whether a function is marked so."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "_releases_gil", None) is True and not hasattr(fn, "__wrapped__")


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
    if isinstance(images, (list, tuple)) or (isinstance(images, np.ndarray) and images.ndim == 4):
        return np.stack([fn(image) for image in images])
    return fn(images)
