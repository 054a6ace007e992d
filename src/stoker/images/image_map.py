"""Functions of one image as maps of images and of batches, random ones too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.lending import reads_only


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
