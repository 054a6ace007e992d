"""``advise``: measures whether to decode images before an echo, or only crops after it.

There are two orders. Cropping files decodes the part that each crop needs, at each use. Decoding
first decodes the whole image once, and each use crops pixels. The cheaper order depends on the
files, on the crop and on how often an image is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from stoker.basics.pytree import Field
from stoker.images.decoding import decode, file_bytes, is_file
from stoker.images.image_map import ImageMap, RandomImageMap

# Files that are decoded in both orders, ``_ROUNDS`` times: some seconds of photographs. Chosen, not
# measured.
_IMAGES = 48
# The least of three: another program seldom disturbs all of them.
_ROUNDS = 3

_measured: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], CropAdvice]]
_measured = weakref.WeakKeyDictionary()
"""The last advice for each crop, with the source whose images were measured."""


class SourceAndStages(Protocol):
    """The part of a chain that ``advise`` reads."""

    @property
    def source(self) -> Any: ...
    @property
    def stages(self) -> Sequence[Any]: ...


class HasChain(Protocol):
    """The part of a pipeline that ``advise`` reads."""

    @property
    def chain(self) -> Any: ...


@dataclass(frozen=True)
class CropAdvice:
    """The cost of decoding and cropping a sample of images, in the measuring thread.

    Attributes:
        images: how many were tried.
        decode_ms: processor time of decoding one image in full, in ms.
        crop_of_pixels_ms: processor time of cropping a decoded image, in ms.
        crop_of_file_ms: processor time of cropping an encoded image, in ms.
    """

    images: int
    decode_ms: float
    crop_of_pixels_ms: float
    crop_of_file_ms: float

    @property
    def least_factor(self) -> float:
        """The echoing factor from which decoding first is cheaper; inf: never."""
        saved_ms = self.crop_of_file_ms - self.crop_of_pixels_ms
        return max(1.0, self.decode_ms / saved_ms) if saved_ms > 0 else math.inf

    @property
    def keeps_up_to(self) -> float:
        """The largest R at which cropping files keeps up with training, without an echo.

        R is how long an example takes to prepare over how long it takes to train on, measured with
        full decodes.
        """
        return (self.decode_ms + self.crop_of_pixels_ms) / self.crop_of_file_ms

    def __str__(self) -> str:
        lines = [
            f"{self.images} images, ms of processor time each: decode {self.decode_ms:.2f}, crop "
            f"pixels {self.crop_of_pixels_ms:.2f}, crop the file {self.crop_of_file_ms:.2f}"
        ]
        if self.least_factor == math.inf:
            lines.append("crop files: cropping pixels is no cheaper, however often they are used")
        elif self.least_factor <= 1:
            lines.append("decode first: cropping a file costs as much as decoding all of it")
        else:
            lines += [
                f"crop files while that keeps up: to R = {self.keeps_up_to:.1f}, as measured with "
                "full decodes",
                "beyond, decode before the echo and crop pixels behind it: cheaper from a factor "
                f"of {self.least_factor:.1f} on",
            ]
        return "\n".join(lines)


def advise(pipeline: HasChain) -> CropAdvice:
    """Measure which is cheaper on a pipeline's own images: crops of files, or decoding first.

    Reads up to 48 examples as the pipeline does, from the beginning of an epoch, and measures both
    orders on each of them, three times, in the calling thread. The pipeline's own position does not
    change.

    Args:
        pipeline: has a crop of ``stoker.images`` in it, ``center_crop`` or ``random_resized_crop``
            for example: of files, or after a ``.map(stoker.images.decode)``.

    Returns:
        The measurements, after printing them. ``print(pipeline)`` repeats them from then on.

    Raises:
        ValueError: the pipeline has no such crop, other functions stand between the crop and the
        decoding, or there are no examples.
        TypeError: the examples' images are not encoded files (``bytes``).
        OSError: none of the images can be decoded. Single ones that cannot are left out.
    """
    if not hasattr(pipeline, "chain"):
        raise TypeError(f"advise takes a pipeline, not {type(pipeline).__name__}")
    stages = pipeline.chain.stages
    first, crop_at = _places(stages)
    crop, on = stages[crop_at].fn, stages[first].on
    reading = tuple(s for s in stages[:first] if not _is_passed_over(s))
    chain = dataclasses.replace(pipeline.chain, stages=reading, steps=None, flows=False)
    anew: Any = type(pipeline)
    with closing(iter(anew(chain))) as examples:
        files = [_file(example, on) for example in islice(examples, _IMAGES)]
    if not files:
        raise ValueError("there are no examples to try this with")
    whole = stages[first].fn if first < crop_at else decode
    files = _sound(files, whole, crop)
    costs_s = np.min([_costs_s(files, whole, crop) for _ in range(_ROUNDS)], axis=0).mean(axis=0)
    advice = CropAdvice(len(files), *(1000 * costs_s).tolist())
    _measured[crop] = weakref.ref(pipeline.chain.source), advice
    print(advice)
    return advice


def hint(chain: SourceAndStages, at: int) -> str:
    """Return the note of ``print(pipeline)`` after the first stage that gets files.

    The note names the cheaper order once ``advise`` has measured it; before that it points to
    ``advise``, if files are decoded in full and cropped later.
    """
    stages: Sequence[Any] = chain.stages
    if not (_decodes(stages[at].fn) or _crops(stages[at].fn)):
        return ""
    try:
        first, crop_at = _places(stages)
    except ValueError:
        return ""
    if first != at:
        return ""
    source, advice = _measured.get(stages[crop_at].fn, (None, None))
    if advice is None or source is None or source() is not chain.source:
        unknown = (
            "  in full; stoker.images.advise(pipeline) tells whether cropping files is cheaper"
        )
        return unknown if first < crop_at else ""
    factor = advice.least_factor
    if first < crop_at:
        if factor <= 1:
            return "  in full; measured: cheaper than cropping files"
        how = "at any factor" if factor == math.inf else f"up to a factor of {factor:.1f}"
        return f"  in full; measured: cropping files is cheaper {how}"
    if factor == math.inf or not any(stage.traits.repeats for stage in stages[:at]):
        return ""
    return f"  measured: decoding before the echo is cheaper from a factor of {factor:.1f} on"


def _places(stages: Sequence[Any]) -> tuple[int, int]:
    """Return the first stage that gets files, and the stage that crops. Raises ValueError."""
    called = [at for at, stage in enumerate(stages) if hasattr(stage, "fn")]
    crop_at = next((at for at in called if _crops(stages[at].fn)), None)
    if crop_at is None:
        raise ValueError(
            "this pipeline has no crop of stoker.images, such as "
            ".random_map(stoker.images.random_resized_crop(224), on='image')"
        )
    first = next((at for at in called if at <= crop_at and _decodes(stages[at].fn)), crop_at)
    between = [
        stages[at].name
        for at in called
        if first < at < crop_at and not _decodes(stages[at].fn)  # each part of a mixture may
    ]
    if between:
        raise ValueError(f"cropping files is no choice: {between[0]} is given whole images before")
    if stages[first].on != stages[crop_at].on:
        raise ValueError(f"{stages[crop_at].name} does not crop what {stages[first].name} decodes")
    return first, crop_at


def _decodes(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn is decode


def _crops(fn: Any) -> bool:
    return isinstance(fn, (ImageMap, RandomImageMap)) and "crop" in fn.called


def _is_passed_over(stage: Any) -> bool:
    """Whether a trial leaves out a stage: an echo, a cache, sharding, batches."""
    traits = stage.traits
    return bool(traits.repeats or traits.caches or traits.shards or traits.batches)


def _file(example: Any, on: str | int | None) -> bytes:
    data = example if on is None else Field(on).get(example)
    if not is_file(data):
        raise TypeError(f"the images are {type(data).__name__}, and not files: nothing to decode")
    return file_bytes(data)


def _sound(files: list[bytes], whole: Callable[[bytes], Any], crop: Any) -> list[bytes]:
    """Return the files that can be decoded and cropped; raises the error if none can."""
    sound: list[bytes] = []
    for at, data in enumerate(files):
        try:
            _costs_s([data], whole, crop)
        except (OSError, ValueError):
            if not sound and at == len(files) - 1:
                raise
        else:
            sound.append(data)
    return sound


def _costs_s(
    files: list[bytes], whole: Callable[[bytes], Any], crop: Any
) -> list[tuple[float, float, float]]:
    """Return the processor time of a full decode, a crop of that and a crop of the file, each."""
    made: list[tuple[float, float, float]] = []
    for number, data in enumerate(files):

        def cropped(image: Any, seed: int = number) -> None:  # the same box each time
            if isinstance(crop, RandomImageMap):
                crop(image, np.random.default_rng(seed))
            else:
                crop(image)

        began_s = time.thread_time()
        pixels = whole(data)
        decoded_s = time.thread_time()
        cropped(pixels)
        done_s = time.thread_time()
        cropped(data)
        made.append((decoded_s - began_s, done_s - decoded_s, time.thread_time() - done_s))
    return made
